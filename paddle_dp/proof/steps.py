"""Compares the recipe's first steps on both sides with one process's drift from itself after a change of one ulp."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_dp.proof.compare import EPS, NO_GRADIENT, K, least_of_a_score, ratio, undetermined
from paddle_dp.proof.trace_files import SCORE, Key, Trace, key, number_key, numbers_of


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A number on both sides and its drift on one process; r: their distance over it, 0 for equal infinities.

    `many` is None in steps whose numbers the ranks do not read; what they learn there shows in the next step.
    """

    one: float
    many: float | None
    drift: float

    @property
    def apart(self) -> float:
        if self.many is None or self.one == self.many or (np.isnan(self.one) and np.isnan(self.many)):
            return 0.0
        apart = abs(self.one - self.many)
        return apart if np.isfinite(apart) else float("inf")

    @property
    def r(self) -> float:
        return ratio(self.apart, self.drift) if np.isfinite(self.drift) else 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of both sides; `r` is judged with K."""

    number: int
    shares: tuple[int, ...]
    loss: Pair
    gradient_norm: Pair
    scores: Mapping[str, Pair] = field(default_factory=dict)
    strays: float = 0.0  # one process's relative drift: the larger of the two
    empty: bool = False  # nothing in its batch counts: its loss is no number, and there is no update
    judged: bool = True  # False from the step on in which one process's drift is too large to compare with

    @property
    def r(self) -> float:
        pairs = (self.loss, self.gradient_norm, *self.scores.values())
        return max(pair.r for pair in pairs) if self.judged else 0.0

    @property
    def read(self) -> bool:
        """Whether the ranks read the numbers of the step."""
        return self.loss.many is not None

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([self.loss.one, self.gradient_norm.one]).all())


@dataclass
class Steps:
    """Every step, and the distance of all weights together after the last one (`weights`)."""

    one: Trace
    many: Trace
    turned: float = 1.0  # how much further apart than noise the first gradients are, without a fault

    def __post_init__(self) -> None:
        self.dtype: str = self.one.facts["dtype"]
        pairs = zip(self.one.facts["rows"], self.many.facts["rows"], strict=True)
        self.steps = [self._step(number, a, b) for number, (a, b) in enumerate(pairs, start=1)]
        if self.lost is not None:
            first = self.lost.number
            self.steps = [replace(step, judged=step.number < first) for step in self.steps]
        self.weights = self._weights()

    @property
    def same(self) -> bool:
        return all(step.r <= K for step in self.steps) and self.weights.r <= K

    @property
    def broken(self) -> Step | None:
        """The first step whose numbers are not finite on one process, though something in it counts."""
        return next((step for step in self.steps if not (step.finite or step.empty)), None)

    @property
    def ended(self) -> Step | None:
        """The first step from which on no step has finite numbers on one process; None if the last one has.

        In float16 a gradient that overflows is no end: that update is left out, and the loss scale goes down.
        """
        found = None
        for step in reversed(self.steps):
            if step.empty:
                continue
            if np.isfinite(step.loss.one) if self.dtype == "float16" else step.finite:
                break
            found = step
        return found

    @property
    def lost(self) -> Step | None:
        """The first step in which one process's drift is so large that there is no true number to compare with.

        As for elements of a gradient that are noise: a multiple of chaotic drift proves nothing.
        """
        return next((s for s in self.steps if s.finite and s.strays >= NO_GRADIENT), None)

    @property
    def moved(self) -> bool:
        """Whether any weight of one process changed between the first step and the last.

        A weight that is not finite at the end counts only if the updates before it were finite.
        """
        last = [Key.read(number) for number in self.one.keys if number.startswith("weight|")]
        pairs = ((self.one.array(key("initial", 0, w.name)), self.one.array(key(*w))) for w in last)
        learned = self._finite_steps > 1  # before the numbers broke
        return any(
            bool(np.any((before != after) & (learned | np.isfinite(after)))) for before, after in pairs
        )

    @property
    def _finite_steps(self) -> int:
        return len(self.steps) if self.broken is None else self.broken.number - 1

    def _step(self, number: int, one: Mapping[str, Any], many: Mapping[str, Any]) -> Step:
        eps = EPS[self.dtype]
        return Step(
            number=number,
            shares=tuple(many["shares"]),
            loss=self._pair("loss", number, one, many, min(eps, EPS["float32"])),
            gradient_norm=self._pair("gradient_norm", number, one, many, eps),
            scores={
                name.removeprefix(SCORE): self._pair(name, number, one, many, eps)
                for name in numbers_of(one)
                if name.startswith(SCORE)
            },
            empty=bool(one.get("empty") and many.get("empty")),
            strays=max(self._strays_by(what, number, eps) for what in ("loss", "gradient_norm")),
        )

    def _strays_by(self, what: str, number: int, eps: float) -> float:
        """The drift up to a step, as a part of the largest number so far: a loss near 0 is not chaos, nor is a gradient
        that training has made small."""
        sizes = [abs(row[what]) for row in self.one.facts["rows"][:number] if np.isfinite(row[what])]
        return ratio(self._strays(what, eps)[number - 1], max(sizes, default=0.0))

    def _pair(
        self, what: str, number: int, one: Mapping[str, Any], many: Mapping[str, Any], eps: float
    ) -> Pair:
        """Judged by the drift up to the next step: with exponential growth one side may be a step ahead."""
        strays = self._strays(what, eps)
        ahead = strays[number] if number < len(strays) else strays[-1] * growth(strays)
        ahead = max(ahead, strays[number - 1])  # of a number that is smaller in the next step
        rounded = self.many.rounded(key("gradient norm", number, "")) if what == "gradient_norm" else 0.0
        if what.startswith(SCORE):
            ahead = max(ahead, least_of_a_score(self.dtype, one["samples"]))
        return Pair(one=one[what], many=many.get(what), drift=self.turned * ahead + rounded / K)

    def _strays(self, what: str, eps: float) -> list[float]:
        """By step: the largest distance of any run with noise so far; one unit in the last place at least."""
        rows, runs = self.one.facts["rows"], self.one.facts["drift"]
        first = self.one.noise(number_key(what, 1))
        # Of a first batch in which nothing counts, or that overflows, the distance is no number.
        worst, found = 0.0 if first is None or np.isnan(first[1]) else first[1], []
        for k, row in enumerate(rows):
            worst = max([worst, *(_stray(run[k][what], row[what]) for run in runs if k < len(run))])
            found.append(max(worst, eps * abs(row[what]) if np.isfinite(row[what]) else 0.0))
        return found

    def _weights(self) -> Pair:
        """The distance of all trained weights together, without elements whose first gradient is not a true one."""
        apart = noise = size = 0.0
        for number in sorted(n for n in self.one.keys & self.many.keys if Key.read(n).kind == "weight"):
            one, many = self.one.array(number), self.many.array(number)
            noisy = self.one.noise(number)
            most = noisy[0] if noisy is not None else np.zeros_like(one)
            chosen = ~self._undetermined(Key.read(number).name, one.shape)
            equal = (one == many) | (np.isnan(one) & np.isnan(many))
            with np.errstate(invalid="ignore"):
                apart += float(np.square(np.where(equal, 0, many - one)[chosen]).sum())
            noise += float(np.square(most[chosen].astype("float64")).sum())
            size += float(np.square(one[chosen]).sum())
        floor = max(noise**0.5, min(EPS[self.dtype], EPS["float32"]) * size**0.5)
        ahead = self.turned * growth(self._strays("loss", min(EPS[self.dtype], EPS["float32"])))
        if self.lost is not None:
            ahead = float("inf")
        return Pair(one=0.0, many=apart**0.5, drift=ahead * floor)

    def _undetermined(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        masks = [np.zeros(shape, bool)]
        for step in self.one.facts["recorded"]:
            number = key("gradient", step, name)
            noise = self.one.noise(number)
            if noise is not None:
                masks.append(undetermined(self.one.array(number), noise[0]))
        found: np.ndarray = np.any(masks, axis=0)
        return found


def growth(strays: Sequence[float]) -> float:
    """The largest growth factor of a curve in one step; 1 if it does not grow, or is not finite."""
    pairs = itertools.pairwise(strays)
    return max([1.0, *(b / a for a, b in pairs if 0 < a < b < float("inf"))])


def _stray(noisy: float, plain: float) -> float:
    """The distance of a run with noise; infinite if only one of the two is finite."""
    if noisy == plain or (np.isnan(noisy) and np.isnan(plain)):
        return 0.0
    apart = abs(noisy - plain)
    return apart if np.isfinite(apart) else float("inf")


def shares(numbers: Sequence[int]) -> str:
    """ "16+17+17=50": the ranks' samples of the global batch."""
    if len(numbers) > 4:
        return f"{len(numbers)}×({min(numbers)} to {max(numbers)})={sum(numbers)}"
    return f"{'+'.join(map(str, numbers))}={sum(numbers)}"
