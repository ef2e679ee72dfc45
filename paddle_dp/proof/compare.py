"""Compares two sides: the distance of each quantity in units of one process's noise. Does not import paddle.

For a quantity p (a parameter's gradient, its update, a loss …), with 2-norms over its elements:

    F_p = the largest |noisy run - run| over one process's runs with noise (proof.noise), at least eps · |p|
    r_p = |many - one| / F_p

If ranks round their gradients in the exchange (reduce_dtype), a bound of that error follows from the rounded values
(exchange.roundings). It is allowed in addition to the noise: |many - one| ≤ K F_p + bound_p. It is no
measurement, so K does not multiply it.

An update or optimizer state is compared with one process's result from the ranks' gradients (proof.replay). Then F_p is
only the last place of both: eps · |p|, and for an update, the difference of two weights, eps · |weight|.

A comparison proves something only if F is small: a fault of a tenth of a parameter's gradient, on one rank of N, must
show. So for every gradient g, with G the whole model's and β = ROUNDING_BOUND (a gradient below β |G| counts as 0),

    shows · N ≤ VISIBLE_FAULT    with    shows = (K F + bound) / max(|g|, β |G|)

`shows` is computed here (`_shows`), and multiplied by N in proof.verdict (`Verdict.insensitive`).

Correct layouts give r of about 1, because they differ by rounding alone; K = `tolerance.LARGEST_R` = 8 leaves room for
chance. Elements with noise of their size (F/|g| > 0.3) have no true gradient: they are judged separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paddle_dp.proof.tolerance import (
    EPS,
    LARGEST_R,
    ROUNDING_BOUND,
    ZERO_FRACTION,
    arithmetic_eps,
    is_same,
    least_of_a_score,
    ratio,
    undetermined,
    unit_of,
)
from paddle_dp.proof.trace_files import REPLAYED, Key, Trace, key_of

# The largest part of a parameter's gradient that switched ReLUs and max poolings may explain; measured: 0.07
# (densenet121). TURNED_WITH_FLOAT64 applies if float64, in which none switches, is compared, too; measured: 0.26
# (shufflenet_v2_x0_25 at 64 pixels, whose last pictures have 4 pixels).
TURNED, TURNED_WITH_FLOAT64 = 0.2, 0.4
LARGEST_TURN = 1e4  # in units of the noise
KINDS = (
    "initial", "evaluation", "loss", "gradient norm", "score", "gradient", "probe", "update", "frozen", "state",
    "statistic", "buffer",
)  # fmt: skip
EXACT_KINDS = ("initial", "frozen")  # equal bits, or different
_NUMBER_KINDS = ("loss", "gradient norm", "score")  # of every step; proof.steps judges the later steps
_GRADIENT_KINDS = ("gradient", "probe")


@dataclass(frozen=True, kw_only=True)
class QuantityDistance:
    """The distance of one quantity on both sides. `r` is infinite if only one side has it."""

    quantity: Key
    r: float
    noise: float = 0.0  # F / |one|
    # The unit of r, as a part of |one|: F, at least one unit in the last place, and the rounding bound / K.
    unit: float = 0.0
    undetermined: float = 0.0  # the share of its elements without a true gradient
    # For a gradient: the smallest fault on all ranks that shows, as a part of |one|, or of β |G| if larger.
    shows: float = 0.0
    missing: str = ""  # "one" or "many": the side that lacks it

    @property
    def same(self) -> bool:
        return is_same(self.r)


@dataclass(frozen=True)
class KindSummary:
    """The distances of all quantities of a kind: their number, and the largest."""

    kind: str
    count: int
    worst: QuantityDistance


@dataclass
class TraceComparison:
    """The traces of one process and of many ranks, in one precision.

    `float64_trace`: one process's trace in float64, if any; it shows which gradients are truly zero. `replayed`: one
    process's updates and states from the gradients of `candidate`; without it, `reference` has them. `turns`: rounding
    may switch a ReLU or a pooling of the model.
    """

    reference: Trace
    candidate: Trace
    float64_trace: Trace | None = None
    replayed: Trace | None = None
    turns: bool = True

    def __post_init__(self) -> None:
        self.dtype: str = self.reference.facts["dtype"]
        # The error that the ranks raised when they compared their weights.
        self.divergence: str | None = self.candidate.facts["divergence"]
        self._sizes: dict[tuple[str, int, str], float] = {}
        # By name: r of each gradient of a first batch that probes contradict.
        self.turned: dict[str, float] = {}
        self.distances = self._cleared(list(self._distances()))

    @property
    def sides(self) -> tuple[Trace, Trace]:
        """One process, and the ranks."""
        return self.reference, self.candidate

    @property
    def same(self) -> bool:
        return not (self.divergence or self.unshared) and all(distance.same for distance in self.distances)

    @property
    def unshared(self) -> list[Key]:
        """The weights of which ranks hold different copies after an update; one process is compared with one copy."""
        return [key for key in map(Key.read, self.candidate.facts["copy_groups"]) if key.kind == "weight"]

    @cached_property
    def summaries(self) -> list[KindSummary]:
        by_kind = ((kind, self._kind_distances(kind)) for kind in KINDS)
        return [
            KindSummary(kind, len(distances), max(distances, key=lambda distance: distance.r))
            for kind, distances in by_kind
            if distances
        ]

    def _kind_distances(self, kind: str) -> list[QuantityDistance]:
        return [distance for distance in self.distances if distance.quantity.kind == kind]

    @property
    def noise(self) -> float:
        """The median over parameters of F/|g| of the first gradient."""
        distances = [d for d in self._kind_distances("gradient") if d.undetermined < 1 and not d.missing]
        first_step = min((d.quantity.step for d in distances), default=0)
        first = [d.noise for d in distances if d.quantity.step == first_step]
        return float(np.median(first)) if first else 0.0

    def visible(self, ranks: int) -> float:
        """The smallest relative fault of one rank's gradient that would be detected: (K · noise + rounding) · ranks."""
        return (LARGEST_R * self.noise + self.rounded) * ranks

    @cached_property
    def shows(self) -> dict[str, float]:
        """By parameter: the smallest relative gradient fault on all ranks that every step would show."""
        worst: dict[str, float] = {}
        for distance in self._kind_distances("gradient"):
            if not distance.missing:
                name = distance.quantity.name
                worst[name] = max(worst.get(name, 0.0), distance.shows)
        return worst

    @cached_property
    def rounded(self) -> float:
        """The median over parameters of the first gradient's relative rounding bound."""
        first = [key for key in sorted(self.candidate.keys) if Key.read(key)[:2] == ("gradient", 1)]
        bounds = [ratio(self.candidate.rounded(key), _norm(self.candidate.array(key))) for key in first]
        return float(np.median(bounds)) if bounds else 0.0

    @property
    def without_gradient(self) -> list[QuantityDistance]:
        """The distances of gradients of which a tenth or more is noise."""
        return [d for d in self._kind_distances("gradient") if d.undetermined >= 0.1]

    def reference_array(self, key: str) -> np.ndarray:
        """One process's value of a quantity; updates and states are from the ranks' gradients."""
        replayed = self.replayed if Key.read(key).kind in REPLAYED else None
        return (replayed or self.reference).array(key)

    def _distances(self) -> Iterator[QuantityDistance]:
        watched = set(self.reference.facts["recorded"]) | set(self.candidate.facts["recorded"])
        for key in sorted(self.reference.keys | self.candidate.keys):
            quantity = Key.read(key)
            is_number, is_missing = quantity.kind in _NUMBER_KINDS, key not in self.candidate.keys
            if quantity.kind not in KINDS or (is_number and quantity.step not in watched):
                continue
            if is_missing and is_number and not self._ranks_read(quantity.step):
                continue
            if is_missing or key not in self.reference.keys:
                side = "many" if is_missing else "one"
                yield QuantityDistance(quantity=quantity, r=float("inf"), missing=side)
            else:
                distance = self._distance(quantity, self.reference_array(key), self.candidate.array(key))
                if quantity.kind == "probe" and not distance.same and self._may_turn(distance):
                    distance = replace(distance, r=min(self._r_at_initial_weights(distance)))
                yield distance

    def _ranks_read(self, step: int) -> bool:
        """Whether the ranks read the numbers of a step; a loss or a score that is then missing is a difference."""
        rows = self.candidate.facts["rows"]
        return step <= len(rows) and bool(rows[step - 1]["collected"])

    def _cleared(self, distances: list[QuantityDistance]) -> list[QuantityDistance]:
        """The distances, with the smallest r of several batches for gradients at equal weights.

        A fault shows in every batch. A ReLU or a max pooling that switches because of the last place of its input does
        not: it concerns one sample at one position.
        """
        gradients = [d for d in distances if d.quantity.kind == "gradient"]
        r_by_step = {(d.quantity.step, d.quantity.name): d.r for d in gradients}
        cleared, turned = [], dict[str, float]()
        for distance in distances:
            quantity = distance.quantity
            if quantity.kind == "gradient" and not distance.same and not distance.missing:
                smallest = min([distance.r, *self._r_in_other_batches(quantity, r_by_step)])
                may_turn = self.turns and distance.r < LARGEST_TURN and self._may_turn(distance)
                if may_turn and is_same(smallest):
                    turned[quantity.name] = distance.r
                    distance = replace(distance, r=smallest)
            cleared.append(distance)
        if not turned:
            return cleared
        left = [distance for distance in cleared if distance.quantity.kind != "gradient norm"]
        if not all(distance.same for distance in left):  # a remaining fault may be the cause of all of it
            return distances
        self.turned = turned
        return left

    def _may_turn(self, distance: QuantityDistance) -> bool:
        """Whether the distance is as small as a switched ReLU makes it."""
        return distance.r * distance.unit <= (TURNED if self.float64_trace is None else TURNED_WITH_FLOAT64)

    def _r_in_other_batches(self, quantity: Key, r_by_step: dict[tuple[int, str], float]) -> Iterator[float]:
        """r of a parameter's gradient in other batches, in which a fault of this step would show, too.

        These are the probes at the initial weights. Ranks that round have equal weights in all compared steps: the next
        two steps count, or at the end the previous two, and the probes for the first step only.
        """
        if not self.candidate.facts.get("rounded"):
            yield from self._probes(quantity.name)
            return
        steps = sorted(step for step, name in r_by_step if name == quantity.name)
        at = steps.index(quantity.step)
        compared_steps = steps[at + 1 : at + 3] or steps[max(at - 2, 0) : at]
        yield from (r_by_step[step, quantity.name] for step in compared_steps)
        if at == 0:
            yield from self._probes(quantity.name)

    def _r_at_initial_weights(self, distance: QuantityDistance) -> list[float]:
        """r of a probe's parameter in each probe; if there is one only, also in the first batch. That batch may have
        equal shares, but where `turns`, float64 has seen that unequal ones are the same."""
        probes, first = self._probes(distance.quantity.name), key_of("gradient", 1, distance.quantity.name)
        has_first = first in self.reference.keys and first in self.candidate.keys
        if len(probes) == 1 and self.turns and has_first and distance.r < LARGEST_TURN:
            probes.append(self._r(first))
        return probes

    def _probes(self, name: str) -> list[float]:
        """r of a parameter's gradient in each further batch."""
        probes = (key for key in self.reference.keys & self.candidate.keys if key.startswith("probe|"))
        return [self._r(key) for key in sorted(probes) if Key.read(key).name == name]

    def _r(self, key: str) -> float:
        return self._distance(Key.read(key), self.reference.array(key), self.candidate.array(key)).r

    def _distance(self, quantity: Key, reference: np.ndarray, candidate: np.ndarray) -> QuantityDistance:
        if reference.shape != candidate.shape:
            return QuantityDistance(quantity=quantity, r=float("inf"))
        difference, broken = _subtract(reference, candidate)
        if broken or quantity.kind in EXACT_KINDS:
            is_same_number = not (broken or np.any(difference))
            return QuantityDistance(quantity=quantity, r=0.0 if is_same_number else float("inf"))
        size, nothing = _norm(reference), ZERO_FRACTION[self.dtype] * self._size(quantity)
        if quantity.kind == "buffer":  # a constant, such as a mask of -1e30, has no rounding
            size = _norm(reference[difference != 0])
        if quantity.kind in REPLAYED:
            ulps = max(arithmetic_eps(self.dtype) * size, self._ulp_error(quantity), nothing)
            return QuantityDistance(quantity=quantity, r=ratio(_norm(difference), ulps))
        key = key_of(*quantity)
        noise = self.reference.noise(key)
        most, floor = noise if noise is not None else (np.zeros(reference.shape), 0.0)
        if quantity.kind == "score":
            samples = self.reference.facts["rows"][quantity.step - 1]["samples"]
            floor = max(floor, least_of_a_score(self.dtype, samples))
        if quantity.kind == "evaluation" and quantity.name != "loss":
            floor = max(floor, least_of_a_score(self.dtype, self.reference.facts["evaluated"]))
        mask, rounded = self._undetermined(quantity, reference.shape), self.candidate.rounded(key)

        def allowed(chosen: np.ndarray, at_least: float) -> float:
            noisy = floor if chosen.all() else float(np.linalg.norm(most[chosen].astype("float64")))
            return unit_of(max(noisy, nothing), at_least, EPS[self.dtype], rounded)

        def r(chosen: np.ndarray, at_least: float) -> float:
            return ratio(_norm(difference[chosen]), allowed(chosen, at_least))

        fraction = float(mask.mean()) if mask.size else 0.0
        largest_r = max(r(~mask, size), r(mask, 0.0))
        unit = ratio(allowed(~mask, size), size)
        gradient_unit = unit_of(floor, size, EPS[self.dtype], rounded)
        shows = self._shows(quantity, size, gradient_unit) if quantity.kind == "gradient" else 0.0
        return QuantityDistance(
            quantity=quantity, r=largest_r, noise=ratio(floor, size), unit=unit, undetermined=fraction, shows=shows
        )  # fmt: skip

    def _shows(self, quantity: Key, size: float, unit: float) -> float:
        """The smallest fault of a gradient that shows, as a part of it; 0 if the whole model has no gradient."""
        smallest = max(size, ROUNDING_BOUND.get(self.dtype, 0.0) * self._size(quantity))
        return LARGEST_R * ratio(unit, smallest) if smallest > 0 else 0.0

    def _ulp_error(self, quantity: Key) -> float:
        """The error of an update from the last places of its two weights."""
        key = key_of("initial", 0, quantity.name)
        if quantity.kind != "update" or key not in self.reference.keys:
            return 0.0
        return arithmetic_eps(self.dtype) * _norm(self.reference.array(key))

    def _undetermined(self, quantity: Key, shape: tuple[int, ...]) -> np.ndarray:
        """A mask of the elements without a true gradient; empty for other quantities."""
        trace, kind, step = self.reference, quantity.kind, quantity.step
        if self.float64_trace is not None:  # it has no probes
            trace, kind = self.float64_trace, "gradient"
            step = next(iter(trace.facts["recorded"]), 1)
        key = key_of(kind, step, quantity.name)
        noise = trace.noise(key) if quantity.kind in _GRADIENT_KINDS else None
        return np.zeros(shape, bool) if noise is None else undetermined(trace.array(key), noise[0])

    def _size(self, quantity: Key) -> float:
        """The 2-norm over the quantities of a group; 0 without one."""
        group = _size_group(quantity)
        if group is None:
            return 0.0
        if group not in self._sizes:
            keys = [key for key in self.reference.keys if _size_group(Key.read(key)) == group]
            self._sizes[group] = _norm(np.array([_norm(self.reference.array(key)) for key in keys]))
        return self._sizes[group]


def _size_group(quantity: Key) -> tuple[str, int, str] | None:
    """The group with one size in `_size`: all of a kind and step, or the states of one accumulator.

    None for buffers and held-out numbers, which have nothing to do with each other: a mask of -1e30 or a perplexity
    would hide the rest.
    """
    if quantity.kind == "state":
        return quantity.kind, quantity.step, quantity.name.rpartition("/")[2]
    grouped = quantity.kind in (*_GRADIENT_KINDS, "update", "statistic")
    return (quantity.kind, quantity.step, "") if grouped else None


def _norm(array: np.ndarray) -> float:
    """The 2-norm of the finite elements: an infinity would allow any distance to the others."""
    flat = np.asarray(array, "float64").reshape(-1)
    return float(np.linalg.norm(flat[np.isfinite(flat)]))


def _subtract(reference: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, bool]:
    """candidate - reference, 0 where both are the same infinity or NaN; and whether another element is not finite."""
    finite = np.isfinite(reference) & np.isfinite(candidate)
    equal = finite | (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
    return np.where(finite, candidate, 0.0) - np.where(finite, reference, 0.0), not bool(equal.all())
