"""Compares two sides: the distance of each quantity, in units of one process's own noise. Does not import paddle.

For a quantity p (a parameter's gradient, its update, a loss …), with 2-norms over its elements:

    F_p = the largest |noisy run - run| over one process's runs with noise (proof.noise), at least eps · |p|
    r_p = |many - one| / F_p

Where ranks round their gradients on their way (reduce_dtype), a bound of what that takes is computed from what they
rounded (parallel.exchange.roundings), and allowed beside the noise: |many - one| ≤ K F_p + bound_p. It is no
measurement, so it is not multiplied by K.

An update, and an optimizer state, is compared with what one process computes from the ranks' own gradients
(proof.replay); then F_p is only the last place of both: eps · |p|, and for an update, the difference of two weights,
eps · |weight|.

A comparison proves something only where F is small: a fault of a tenth of a parameter's gradient, on one rank of N,
must show. So of every gradient g, with G the whole model's and β = BEYOND (what is less of G is nothing),

    shows = (K F + bound) · N / max(|g|, β |G|) ≤ VISIBLE

Correct layouts give r of about 1, since rounding is all their difference; K = 8 leaves room for chance. Elements whose
noise is as large as they are (F/|g| > 0.3) have no true gradient: they are judged separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paddle_dp.proof.trace_files import REPLAYED, Key, Trace, key

K = 8.0
# F/|g| from which on an element counts as noise. Measured: at most 0.07 for true gradients, at least 1.2 for others.
NO_GRADIENT = 0.3
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Part of a quantity that rounding stays below: about half of the digits. Low precisions are too coarse for a bound.
BEYOND = {"float64": 2.0**-22, "float32": 2.0**-8}
# A parameter's part of the whole gradient below which it is zero; for quantities without noise of their own only.
NOTHING = {"float64": 2.0**-53}
SLIGHT = 2.0**-40
# The largest part of a parameter's gradient that switched ReLUs and max poolings may explain; measured: 0.07
# (densenet121).
TURNED = 0.2
LARGEST_TURN = 1e4  # in units of the noise
VISIBLE = 0.1  # the fault, as a part of any parameter's gradient, that must show
JUDGED = (
    "initial", "loss", "gradient norm", "score", "gradient", "probe", "update", "frozen", "state", "statistic",
    "buffer",
)  # fmt: skip
EXACT = ("initial", "frozen")  # equal bits, or different
_NUMBERS = ("loss", "gradient norm", "score")  # of every step; proof.steps judges those of the later ones
_MASKED = ("gradient", "probe")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One quantity on both sides. `r` is infinite if only one side has it."""

    key: Key
    r: float
    noise: float = 0.0  # F / |one|
    # Of r, as a part of |one|: F at least, one unit in the last place, and what may be rounded.
    unit: float = 0.0
    undetermined: float = 0.0  # the part of its elements that have no true gradient
    # Of a gradient: the fault that shows, if all ranks have it, as a part of |one|, or of β |G| where that is larger.
    shows: float = 0.0
    missing: str = ""  # "one" or "many": the side that lacks it

    @property
    def same(self) -> bool:
        return self.r <= K


@dataclass(frozen=True, kw_only=True)
class Row:
    """All quantities of a kind: their number, and the worst of them."""

    kind: str
    count: int
    worst: Finding

    @property
    def same(self) -> bool:
        return self.worst.same


@dataclass
class Part:
    """The trace of one process and that of many ranks, in one precision.

    `truth`: one process's trace in float64, if there is one; it shows which gradients are truly zero. `replayed`: what
    one process computes from the gradients of `many`; without it, updates and states are compared with its own.
    `turns`: rounding may turn something in the model over, a ReLU or a pooling.
    """

    one: Trace
    many: Trace
    truth: Trace | None = None
    replayed: Trace | None = None
    turns: bool = True
    findings: list[Finding] = field(init=False)
    # r of each gradient of a first batch that probes speak against, by name.
    turned: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype: str = self.one.facts["dtype"]
        self._sizes: dict[tuple[str, int, str], float] = {}
        self.findings = self._cleared(list(self._findings()))

    @property
    def same(self) -> bool:
        return not self.amiss and all(finding.same for finding in self.findings)

    @property
    def amiss(self) -> str | None:
        """The error of the ranks' own comparison of their weights, or None."""
        found: str | None = self.many.facts.get("amiss")
        return found

    @cached_property
    def rows(self) -> list[Row]:
        found = []
        for kind in JUDGED:
            some = [finding for finding in self.findings if finding.key.kind == kind]
            if some:
                found.append(Row(kind=kind, count=len(some), worst=max(some, key=lambda one: one.r)))
        return found

    @property
    def noise(self) -> float:
        """The median over parameters of F/|g|, of the first gradient."""
        first = [
            f for f in self.findings if f.key.kind == "gradient" and f.undetermined < 1 and not f.missing
        ]
        steps = [f.noise for f in first if f.key.step == min(one.key.step for one in first)]
        return float(np.median(steps)) if steps else 0.0

    def visible(self, ranks: int) -> float:
        """The smallest relative fault of one rank's gradient that would be detected: K times the noise, and what may be
        rounded, times N."""
        return (K * self.noise + self.rounded) * ranks

    @cached_property
    def shows(self) -> dict[str, float]:
        """By parameter: the smallest relative fault of its gradient on all ranks that would be detected in every step
        recorded."""
        worst: dict[str, float] = {}
        for found in self.findings:
            if found.key.kind == "gradient" and not found.missing and np.isfinite(found.shows):
                worst[found.key.name] = max(worst.get(found.key.name, 0.0), found.shows)
        return worst

    @cached_property
    def rounded(self) -> float:
        """The median over parameters of what rounding may take of the first gradient."""
        first = [n for n in sorted(self.many.keys) if Key.read(n)[:2] == ("gradient", 1)]
        parts = [ratio(self.many.rounded(n), _norm(self.many.array(n))) for n in first]
        return float(np.median(parts)) if parts else 0.0

    @property
    def without_gradient(self) -> list[Finding]:
        """Gradients of which a tenth or more is noise."""
        return [f for f in self.findings if f.key.kind == "gradient" and f.undetermined >= 0.1]

    def of_one(self, number: str) -> np.ndarray:
        """One process's value of a whole quantity; for updates and states, computed from the ranks' gradients."""
        again = self.replayed is not None and Key.read(number).kind in REPLAYED
        trace = self.replayed if again and self.replayed is not None else self.one
        return trace.array(number)

    def _findings(self) -> Iterator[Finding]:
        kinds = set(JUDGED)
        watched = set(self.one.facts["recorded"]) | set(self.many.facts["recorded"])
        for number in sorted(self.one.keys | self.many.keys):
            what = Key.read(number)
            if what.kind not in kinds or (what.kind in _NUMBERS and what.step not in watched):
                continue
            if what.kind in _NUMBERS and number not in self.many.keys:
                continue  # ranks do not read every step
            if number not in self.one.keys or number not in self.many.keys:
                side = "one" if number not in self.one.keys else "many"
                yield Finding(key=what, r=float("inf"), missing=side)
            else:
                found = self._finding(what, self.of_one(number), self.many.array(number))
                if what.kind == "probe" and not found.same and found.r * found.unit <= TURNED:
                    found = replace(found, r=min(self._probes(what.name)))
                yield found

    def _cleared(self, findings: list[Finding]) -> list[Finding]:
        """The findings, with the smallest r of several batches for gradients at equal weights.

        A fault shows in every batch. A ReLU or a max pooling that switches because of the last place of its input does
        not: it concerns one sample at one place.
        """
        cleared, of_step = [], {(f.key.step, f.key.name): f.r for f in findings if f.key.kind == "gradient"}
        turned: dict[str, float] = {}
        for found in findings:
            if found.key.kind == "gradient" and not found.same and not found.missing:
                rs = [found.r, *self._of_other_batches(found.key, of_step)]
                may_turn = self.turns and found.r < LARGEST_TURN and found.r * found.unit <= TURNED
                if may_turn and min(rs) <= K:
                    turned[found.key.name] = found.r
                    found = replace(found, r=min(rs))
            cleared.append(found)
        if not turned:
            return cleared
        left = [found for found in cleared if found.key.kind != "gradient norm"]
        if not all(
            found.same for found in left
        ):  # what is left is a fault, which may be the cause of all of it
            return findings
        self.turned = turned
        return left

    def _of_other_batches(self, what: Key, of_step: dict[tuple[int, str], float]) -> Iterator[float]:
        """r of a parameter's gradient in batches that a fault of this step would show in, too: further ones at the
        initial weights; of ranks that round, whose steps are all compared at equal weights, also in the next two, or at
        the end in the two before."""
        if not self.many.facts.get("rounded"):
            yield from self._probes(what.name)
            return
        steps = sorted(step for step, name in of_step if name == what.name)
        at = steps.index(what.step)
        others = steps[at + 1 : at + 3] or steps[max(at - 2, 0) : at]
        yield from (of_step[step, what.name] for step in others)
        if at == 0:
            yield from self._probes(what.name)

    def _probes(self, name: str) -> Iterator[float]:
        """r of a parameter's gradient in each further batch."""
        for number in sorted(n for n in self.one.keys & self.many.keys if n.startswith("probe|")):
            what = Key.read(number)
            if what.name == name:
                yield self._finding(what, self.one.array(number), self.many.array(number)).r

    def _finding(self, what: Key, one: np.ndarray, many: np.ndarray) -> Finding:
        if one.shape != many.shape:
            return Finding(key=what, r=float("inf"))
        apart, broken = _apart(one, many)
        if broken or what.kind in EXACT:
            return Finding(key=what, r=float("inf") if broken or np.any(apart) else 0.0)
        size, nothing = _norm(one), NOTHING.get(self.dtype, SLIGHT) * self._size(what)
        if what.kind in REPLAYED:
            last_places = max(_arithmetic(self.dtype) * size, self._last_place(what), nothing)
            return Finding(key=what, r=ratio(_norm(apart), last_places))
        noise = self.one.noise(key(*what))
        most, floor = noise if noise is not None else (np.zeros(one.shape), 0.0)
        if what.kind == "score":
            floor = max(floor, least_of_a_score(self.dtype, self.one.facts["rows"][what.step - 1]["samples"]))
        mask, rounded = self._undetermined(what, one.shape), self.many.rounded(key(*what))

        def allowed(chosen: np.ndarray, at_least: float) -> float:
            noisy = floor if chosen.all() else _norm(most[chosen])
            return max(noisy, EPS[self.dtype] * at_least, nothing) + rounded / K

        def r(chosen: np.ndarray, at_least: float) -> float:
            return ratio(_norm(apart[chosen]), allowed(chosen, at_least))

        part = float(mask.mean()) if mask.size else 0.0
        found = max(r(~mask, size), r(mask, 0.0))
        unit = ratio(allowed(~mask, size), size)
        shows = 0.0
        if what.kind == "gradient":
            smallest = max(size, BEYOND.get(self.dtype, 0.0) * self._size(what))
            shows = K * ratio(max(floor, EPS[self.dtype] * size) + rounded / K, smallest)
        return Finding(key=what, r=found, noise=ratio(floor, size), unit=unit, undetermined=part, shows=shows)

    def _last_place(self, what: Key) -> float:
        """The error of an update that comes from the last place of the two weights it is the difference of."""
        number = key("initial", 0, what.name)
        if what.kind != "update" or number not in self.one.keys:
            return 0.0
        return _arithmetic(self.dtype) * _norm(self.one.array(number))

    def _undetermined(self, what: Key, shape: tuple[int, ...]) -> np.ndarray:
        """A mask of the elements without a true gradient; empty for quantities that are not gradients."""
        trace, step = self.one, what.step
        if self.truth is not None:
            trace, step = self.truth, next(iter(self.truth.facts["recorded"]), 1)
        number = key("probe" if what.kind == "probe" and self.truth is None else "gradient", step, what.name)
        noise = trace.noise(number) if what.kind in _MASKED else None
        if noise is None:
            return np.zeros(shape, bool)
        return undetermined(trace.array(number), noise[0])

    def _size(self, what: Key) -> float:
        """The 2-norm over all quantities of one kind and step; of optimizer states, over one accumulator's."""
        alike = _alike(what)
        if alike not in self._sizes:
            some = [n for n in self.one.keys if _alike(Key.read(n)) == alike]
            self._sizes[alike] = _norm(np.array([_norm(self.one.array(n)) for n in some]))
        return self._sizes[alike]


def least_of_a_score(dtype: str, samples: int) -> float:
    """What rounding may do to a score, beside one process's noise. Outside of float64 two classes that tie but for
    rounding may change places; K times this is the part that two samples have in a score of many."""
    return 0.0 if dtype == "float64" else 2.0 / (K * max(samples, 1))


def _arithmetic(dtype: str) -> float:
    """The epsilon of the optimizer's arithmetic, which is float32 at least."""
    return min(EPS[dtype], EPS["float32"])


def _alike(what: Key) -> tuple[str, int, str]:
    """Quantities of one size have this in common; optimizer states only within one accumulator."""
    return what.kind, what.step, what.name.rpartition("/")[2] if what.kind == "state" else ""


def undetermined(gradient: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """A mask where one process's noise is more than 0.3 of the gradient; not where both are 0."""
    return (noise > NO_GRADIENT * np.abs(gradient)) & (noise > 0)


def ratio(apart: float, allowed: float) -> float:
    """apart / allowed; 0 if apart is 0."""
    if apart == 0:
        return 0.0
    return apart / allowed if allowed > 0 else float("inf")


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(array, "float64").reshape(-1)))


def _apart(one: np.ndarray, many: np.ndarray) -> tuple[np.ndarray, bool]:
    """many - one, with 0 where both are the same infinity or both NaN; and whether any element differs otherwise."""
    finite = np.isfinite(one) & np.isfinite(many)
    equal = finite | (one == many) | (np.isnan(one) & np.isnan(many))
    return np.where(finite, many, 0.0) - np.where(finite, one, 0.0), not bool(equal.all())
