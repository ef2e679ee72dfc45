"""Compares the numbers of all steps on both sides, in units of one process's drift from itself in runs with noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paddle_dp.proof.tolerance import (
    EPS,
    LARGEST_R,
    NOISE_LIMIT,
    arithmetic_eps,
    difference,
    is_same,
    least_of_a_score,
    ratio,
    undetermined,
    unit_of,
)
from paddle_dp.proof.trace_files import SCORE, Key, Row, Trace, key_of, number_key, numbers_of


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A number on both sides and its drift on one process; `r`: distance / drift, 0 for equal infinities.

    `many` is None in steps that the ranks do not read; a fault there shows in the next step.
    """

    one: float
    many: float | None
    drift: float

    @property
    def distance(self) -> float:
        return 0.0 if self.many is None else difference(self.one, self.many)

    @property
    def r(self) -> float:
        return 0.0 if self.drift == math.inf else ratio(self.distance, self.drift)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of both sides; `r` is judged by `is_same`."""

    number: int
    shares: tuple[int, ...]
    loss: Pair
    gradient_norm: Pair
    scores: Mapping[str, Pair] = field(default_factory=dict)
    noise_spread: float = 0.0  # one process's relative drift: the larger of the two
    empty: bool = False  # nothing in its batch counts: its loss is no number, and there is no update
    judged: bool = True  # False from the first step with too large a drift of one process

    @property
    def r(self) -> float:
        pairs = (self.loss, self.gradient_norm, *self.scores.values())
        return max(pair.r for pair in pairs) if self.judged else 0.0

    @property
    def is_read(self) -> bool:
        """Whether the ranks read the numbers of the step."""
        return self.loss.many is not None

    @property
    def finite(self) -> bool:
        return bool(np.isfinite([self.loss.one, self.gradient_norm.one]).all())


@dataclass
class StepComparison:
    """Compares every step (`steps`), and all weights together after the last one (`weights`).

    `turned`: the distance of the first gradients in units of noise, if switched ReLUs explain it; else 1.
    """

    reference: Trace
    candidate: Trace
    turned: float = 1.0

    def __post_init__(self) -> None:
        self.dtype: str = self.reference.facts["dtype"]
        rows = zip(self.reference.facts["rows"], self.candidate.facts["rows"], strict=True)
        self.steps = [self._step(number, *pair) for number, pair in enumerate(rows, start=1)]
        if self.lost is not None:
            first = self.lost.number
            self.steps = [replace(step, judged=step.number < first) for step in self.steps]
        self.weights = self._weights()

    @property
    def same(self) -> bool:
        return all(is_same(step.r) for step in self.steps) and is_same(self.weights.r)

    @property
    def broken(self) -> Step | None:
        """The first step that counts and has numbers that are not finite on one process."""
        return next((step for step in self.steps if not (step.finite or step.empty)), None)

    @property
    def ended(self) -> Step | None:
        """The first step from which on no step has finite numbers on one process; None if the last one has.

        In float16 a gradient that overflows is no end: that update is left out, and the loss scale goes down.
        """
        first = None
        for step in reversed(self.steps):
            if step.empty:
                continue
            if np.isfinite(step.loss.one) if self.dtype == "float16" else step.finite:
                break
            first = step
        return first

    @property
    def lost(self) -> Step | None:
        """The first step in which one process's drift is so large that there is no true number to compare with.

        As for elements of a gradient that are noise: a multiple of chaotic drift proves nothing.
        """
        return next((s for s in self.steps if s.finite and s.noise_spread >= NOISE_LIMIT), None)

    @property
    def moved(self) -> bool:
        """Whether any weight of one process changed between the first step and the last.

        A weight that is not finite at the end counts only if the updates before it were finite.
        """
        read = self.reference.array
        last = [key for key in self.reference.keys if key.startswith("weight|")]
        pairs = ((read(key_of("initial", 0, Key.read(key).name)), read(key)) for key in last)
        counts = len(self.steps) > 1 if self.broken is None else self.broken.number > 2
        return any(bool(np.any((before != after) & (counts | np.isfinite(after)))) for before, after in pairs)

    def _step(self, number: int, reference: Row, candidate: Row) -> Step:
        numbers = dict.fromkeys(["loss", "gradient_norm", *numbers_of(reference), *numbers_of(candidate)])
        pairs = {name: self._pair(name, number, reference, candidate) for name in numbers}
        return Step(
            number=number, shares=tuple(candidate["shares"]),
            loss=pairs.pop("loss"), gradient_norm=pairs.pop("gradient_norm"),
            scores={name.removeprefix(SCORE): pair for name, pair in pairs.items()},
            empty=bool(reference.get("empty") and candidate.get("empty")),
            noise_spread=max(self._relative_spread(name, number) for name in ("loss", "gradient_norm")),
        )  # fmt: skip

    def _relative_spread(self, quantity: str, number: int) -> float:
        """The drift up to a step, relative to the largest number so far: no loss near 0 or small gradient is chaos."""
        return ratio(self._noise_spread(quantity)[number - 1], self._sizes(quantity)[number - 1])

    def _sizes(self, quantity: str) -> list[float]:
        """By step: the largest finite number of one process so far."""
        values = [row.get(quantity) for row in self.reference.facts["rows"]]
        sizes = [abs(value) if value is not None and np.isfinite(value) else 0.0 for value in values]
        return list(itertools.accumulate(sizes, max))

    def _growth(self, quantity: str) -> float:
        """The largest growth of the relative drift: a loss that grows from nearly 0 is no growth of its rounding."""
        pairs = zip(self._noise_spread(quantity), self._sizes(quantity), strict=True)
        return growth([spread / size for spread, size in pairs if size > 0])

    def _pair(self, quantity: str, number: int, reference: Row, candidate: Row) -> Pair:
        """The pair, judged by the drift up to the next step: with exponential growth one side may be a step ahead."""
        spread = self._noise_spread(quantity)
        next_drift = spread[number] if number < len(spread) else math.inf
        if next_drift == math.inf:  # unknown, or of a run with noise that breaks there
            next_drift = spread[number - 1] * self._growth(quantity)
        next_drift = max(next_drift, spread[number - 1])  # the number may be smaller in the next step
        is_rounded = quantity == "gradient_norm"
        rounded = self.candidate.rounded(number_key(quantity, number)) if is_rounded else 0.0
        if quantity.startswith(SCORE):
            next_drift = max(next_drift, least_of_a_score(self.dtype, reference["samples"]))
        drift = self.turned * next_drift + rounded / LARGEST_R
        one, many = reference.get(quantity), candidate.get(quantity)
        if many is None and candidate["collected"]:
            many = math.nan  # the ranks read this step's numbers and lack this one
        return Pair(one=math.nan if one is None else one, many=many, drift=drift)

    def _noise_spread(self, quantity: str) -> list[float]:
        """By step: the largest distance of any run with noise so far, at least one unit in the last place."""
        rows, runs = self.reference.facts["rows"], self.reference.facts["drift"]
        eps = arithmetic_eps(self.dtype) if quantity == "loss" else EPS[self.dtype]
        first = self.reference.noise(number_key(quantity, 1))
        # The distance is no number if nothing counts in the first batch, or if it overflows.
        worst, drifts = 0.0 if first is None or np.isnan(first[1]) else first[1], []
        for k, row in enumerate(rows):
            value = row.get(quantity)  # a turn that is not due in this step has no numbers
            if value is not None:
                noisy = [run[k][quantity] for run in runs if k < len(run)]
                worst = max([worst, *(difference(each, value) for each in noisy)])
            drifts.append(max(worst, eps * abs(value) if value is not None and np.isfinite(value) else 0.0))
        return drifts

    def _weights(self) -> Pair:
        """The distance of all trained weights together, without elements that lack a true gradient."""
        distance = noise = size = 0.0
        sides = self.reference, self.candidate
        keys = self.reference.keys | self.candidate.keys
        for key in sorted(key for key in keys if key.startswith("weight|")):
            arrays = [side.array(key) for side in sides if key in side.keys]
            if len(arrays) < 2 or arrays[0].shape != arrays[1].shape:
                distance = math.inf
                continue
            reference, candidate = arrays
            name, noisy = Key.read(key).name, self.reference.noise(key)
            most = noisy[0].astype("float64") if noisy is not None else np.zeros_like(reference)
            chosen = ~self._undetermined(name, reference.shape) & np.isfinite(most)
            equal = (reference == candidate) | (np.isnan(reference) & np.isnan(candidate))
            with np.errstate(invalid="ignore"):
                distance += float(np.square(np.where(equal, 0, candidate - reference)[chosen]).sum())
            # A weight that was not trained has no rounding: a frozen mask of -1e30 would hide all others.
            if np.array_equal(reference, self.reference.array(key_of("initial", 0, name)), equal_nan=True):
                continue
            chosen &= np.isfinite(reference)
            noise += float(np.square(most[chosen]).sum())
            size += float(np.square(reference[chosen]).sum())
        floor = unit_of(noise**0.5, size**0.5, arithmetic_eps(self.dtype))
        next_drift = math.inf if self.lost is not None else self.turned * self._growth("loss")
        return Pair(one=0.0, many=distance**0.5, drift=next_drift * floor)

    def _undetermined(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A mask of a weight's elements without a true gradient in any recorded step."""
        masks = [np.zeros(shape, bool)]
        for step in self.reference.facts["recorded"]:
            key = key_of("gradient", step, name)
            noise = self.reference.noise(key)
            if noise is not None:
                masks.append(undetermined(self.reference.array(key), noise[0]))
        return np.any(masks, axis=0)


def growth(spread: Sequence[float]) -> float:
    """The largest growth factor of a drift from step to step; 1 if it does not grow, or is not finite."""
    pairs = itertools.pairwise(spread)
    return max([1.0, *(b / a for a, b in pairs if 0 < a < b < float("inf"))])


def shares(numbers: Sequence[int]) -> str:
    """ "16+17+17=50": the ranks' samples of the global batch."""
    if len(numbers) > 4:
        return f"{len(numbers)}×({min(numbers)} to {max(numbers)})={sum(numbers)}"
    return f"{'+'.join(map(str, numbers))}={sum(numbers)}"
