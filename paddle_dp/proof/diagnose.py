"""Describes a difference in words, with the mistake that is its likely cause. Pure functions of numbers and arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_dp.text import and_more, numbered, times

Degrees = Mapping[str, int]
EXACT_FACTOR = 1e-3  # tolerance of a factor, and of the part that it does not explain, to count as exact
LEAST_DIFFERENCE = 0.05  # below this relative difference no factor is named
LN_TOLERANCE = 0.05


def samples(reference: Sequence[int], candidate: Sequence[tuple[int, Sequence[int]]]) -> str | None:
    """The fault in the samples of one global batch; None if each sample of `reference` was read exactly once.

    `candidate`: each rank's dp_rank and sample numbers; ranks with one dp_rank must read the same.
    """
    shares: dict[int, list[int]] = {}
    for dp_rank, numbers in candidate:
        if shares.setdefault(dp_rank, list(numbers)) != list(numbers):
            return f"ranks that hold parts of one model (data rank {dp_rank}) read different samples"
    read = Counter(number for numbers in shares.values() for number in numbers)
    expected = Counter(reference)
    twice, never = sorted((read - expected).elements()), sorted((expected - read).elements())
    if not twice and not never:
        return None
    phrases = []
    if repeated := [n for n in twice if n in expected]:
        phrases.append(f"{_samples(repeated)} read {times(read[repeated[0]])}")
    if foreign := [n for n in twice if n not in expected]:
        phrases.append(f"{_samples(foreign)} read, which one process does not read in this step")
    if never:
        phrases.append(f"{_numbers(never)} never" if phrases else f"{_samples(never)} never read")
    return ", ".join(phrases)


def _samples(numbers: Sequence[int]) -> str:
    is_plural = len(set(numbers)) > 1
    return f"sample{'s' * is_plural} {_numbers(numbers)} {'were' if is_plural else 'was'}"


def _numbers(numbers: Sequence[int]) -> str:
    distinct = list(dict.fromkeys(numbers))
    return ", ".join(map(str, distinct[:3])) + and_more(distinct, 3)


def factor(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float]:
    """c = <many, one> / <one, one>, the factor to one process's value, and |many - c · one| / |many|, the part that it
    does not explain. (nan, 1) if one process's value is 0; (nan, nan) if a value is not finite."""
    a, b = reference.reshape(-1).astype("float64"), candidate.reshape(-1).astype("float64")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan, math.nan
    size = float(a @ a)
    if size == 0:
        return math.nan, 1.0
    c, norm = float(a @ b) / size, float(np.linalg.norm(b))
    return c, float(np.linalg.norm(b - c * a)) / norm if norm else 0.0


def scaled(c: float, rest: float, degrees: Degrees, cut: bool) -> str:
    """ "is 0.5 × one process's: …", for a gradient that all its ranks hold alike; `cut`: ranks hold slices."""
    if math.isnan(c):
        if math.isnan(rest):
            return "is not a finite number"
        return "is not zero, as one process's is: something else reaches it"
    off = math.hypot(c - 1, rest * c)
    if off < LEAST_DIFFERENCE:
        return f"is off by {100 * off:.2g} % of one process's"
    if rest > EXACT_FACTOR:
        near = _axis(c, degrees, cut, 0.2) if rest < 1 else ""
        hint = f": perhaps {near}" if near else ""
        return f"is about {c:.2g} × one process's and {min(rest, 1):.0%} something else{hint}"
    if abs(c) < EXACT_FACTOR:
        return "is 0: nothing reaches it"
    if abs(c + 1) < EXACT_FACTOR:
        return "is -1 × one process's: its sign is turned"
    likely = _axis(c, degrees, cut, EXACT_FACTOR)
    return f"is {c:.4g} × one process's" + (f": {likely}" if likely else "")


def _axis(c: float, degrees: Degrees, cut: bool, within: float) -> str:
    """The likely mistake for a factor that is a degree of an axis, or 1 / degree; "" for another factor."""
    often = [axis for axis, d in degrees.items() if d > 1 and abs(c / d - 1) < within]
    seldom = [axis for axis, d in degrees.items() if d > 1 and abs(c * d - 1) < within]
    if often:
        return f"summed twice over the {_either(often, cut)} axis, or summed where it is a mean already"
    if seldom:
        return f"a sum over the {_either(seldom, cut)} axis is missing, or it is a mean where the sum is due"
    product = math.prod(degrees.values())
    if product > 1 and abs(c / product - 1) < within:
        return "summed over all ranks where it is a mean already"
    if product > 1 and abs(c * product - 1) < within:
        return "divided by the number of ranks once too often"
    return ""


def _either(axes: Sequence[str], cut: bool) -> str:
    """The axes of a factor, joined by "or"; slices are not summed over tensor."""
    return " or the ".join([axis for axis in axes if not (cut and axis == "tensor")] or axes)


def unequal_copies(
    reference: np.ndarray, copies: Mapping[int, np.ndarray], coords: Sequence[Degrees], degrees: Degrees
) -> str:
    """A sentence on ranks that hold different copies of one gradient, with the axis over which a sum is missing.

    `coords`: each rank's coordinates. If the sum (or the mean) of the copies along an axis is one process's gradient,
    the exchange along that axis did not happen.
    """
    holders = sorted(copies)
    for axis, degree in degrees.items():
        first = coords[holders[0]]
        line = [r for r in holders if all(coords[r][a] == first[a] for a in degrees if a != axis)]
        if degree < 2 or len(line) != degree:
            continue
        total = np.sum([copies[rank] for rank in line], axis=0)
        for joint in (total, total / degree):
            if _near(joint, reference):
                c, _ = factor(reference, copies[line[0]])
                return (
                    f"on the {axis} axis is {c:.2g} × one process's on rank {line[0]}: a sum over the axis is missing "
                    f"(what ranks {', '.join(map(str, line))} hold {'adds up to' if joint is total else 'averages to'} "
                    "one process's)"
                )
    right = [rank for rank in holders if _near(copies[rank], reference)]
    wrong = [rank for rank in holders if rank not in right]
    if right and wrong:
        c, rest = factor(reference, copies[wrong[0]])
        on_wrong = f"on {numbered('rank', wrong)} it {scaled(c, rest, degrees, False)}"
        return f"is one process's on {numbered('rank', right)}; {on_wrong}"
    return f"differs between {numbered('rank', holders)}, which should hold the same"


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return float(np.linalg.norm(a - b)) <= 1e-6 * float(np.linalg.norm(b))


def loss(reference: float, candidate: float, degrees: Degrees) -> str:
    """A sentence on a loss that differs, with the likely mistake for a known difference or factor."""
    if not math.isfinite(reference) or not math.isfinite(candidate):
        return f"loss is {candidate:g}, one process's {reference:g}"
    for axis, degree in degrees.items():
        if degree > 1 and abs(abs(candidate - reference) / math.log(degree) - 1) < LN_TOLERANCE:
            how = "high" if candidate > reference else "low"
            which = {2: "half", 3: "a third", 4: "a quarter"}.get(degree, f"1/{degree}")
            return (
                f"loss is ln {degree} too {how} ({candidate:.6g}, one process's {reference:.6g}): softmax over {which} "
                f"of the classes, or over classes counted {degree} times ({axis} {degree})"
            )
    c = candidate / reference if reference else math.inf
    likely = _axis(c, degrees, False, EXACT_FACTOR)
    if likely:
        return f"loss is {c:.4g} × one process's: {likely}"
    return f"loss is {candidate:.9g}, one process's {reference:.9g} ({candidate - reference:+.1e})"


def missing(side: str) -> str:
    """A phrase on a quantity that `side` lacks: "one", one process, or "many", the ranks."""
    if side == "many":
        return "is there on one process, and on no rank"
    return "is there on ranks, and not on one process"


def update(c: float, rest: float) -> str:
    """A sentence on an update that differs although its gradient does not."""
    if math.isnan(c):
        return "moves, and one process's does not: frozen there?" if rest == 1 else "is not a finite number"
    off = math.hypot(c - 1, rest * c)
    if off < LEAST_DIFFERENCE:
        return (
            f"is off by {100 * off:.2g} % of one process's, with equal gradients: another clip, rate, decay or state "
            "of the optimizer"
        )
    if rest <= EXACT_FACTOR:
        if abs(c) < EXACT_FACTOR:
            return "is 0: the optimizer does not know this parameter, or its update is not shared"
        return f"is {c:.6g} × one process's, with equal gradients: another learning rate, or a clip by another norm"
    return (
        f"is {c:.3g} × one process's and {min(rest, 1):.0%} something else, with equal gradients: another state, decay "
        "or rounding of the optimizer"
    )


StateChanges = Mapping[str, Mapping[str, Any]]
"""The JSON values that have changed since the beginning of a run, by step (as text) and name (proof.layer_state)."""


def layer_state(
    reference: StateChanges, candidate: Sequence[StateChanges], groups: Sequence[Any], close: float
) -> str | None:
    """A sentence on the first state outside the weights that changes differently on some rank; None if there is none.

    `groups`: by rank, a key that ranks with the same layers and other samples share. Numbers are alike up to `close`,
    relative. A checksum is compared within a group only: rounding changes it, but not between ranks with equal weights.
    """
    for step in sorted({*reference}.union(*candidate), key=int):
        alone, ranks = reference.get(step, {}), [rank.get(step, {}) for rank in candidate]
        pairs = {
            name: pair
            for name in sorted({*alone}.union(*ranks))
            if (pair := _unequal_pair(name, alone, ranks, groups, close)) is not None
        }
        if pairs:
            name, ((holder, value), (other, another)) = next(iter(pairs.items()))
            shown = f"differs between {holder} and {other}"
            if another is None:
                shown = f"changes on {holder} and not on {other}"
            elif isinstance(value, (int, float)) and isinstance(another, (int, float)):
                shown = f"is {value:.6g} on {holder} and {another:.6g} on {other}"
            return f"{name} {shown} after step {step}{and_more(pairs, phrase=' ({} more do, too)')}"
    return None


def _unequal_pair(
    name: str,
    alone: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    groups: Sequence[Any],
    close: float,
) -> tuple[tuple[str, Any], tuple[str, Any]] | None:
    """Two holders that are not alike, each with its value; None for one that has not changed."""
    holders = [rank for rank, values in enumerate(ranks) if name in values]
    if not holders:  # it may be of another rank's layers
        have_all_layers = all(group == groups[0] for group in groups)
        return (("one process", alone[name]), ("rank 0", None)) if have_all_layers else None
    for rank, group in enumerate(groups):
        first = next((other for other in holders if groups[other] == group), rank)
        here, there = ranks[first].get(name), ranks[rank].get(name)
        if first != rank and not _alike(here, there, close):
            return (f"rank {first}", here), (f"rank {rank}", there)
    here, there = ranks[holders[0]][name], alone.get(name)
    checksums = all(isinstance(value, str) and "CRC-32" in value for value in (here, there))
    if checksums or _alike(here, there, close):
        return None
    return (f"rank {holders[0]}", here), ("one process", there)


def _alike(a: Any, b: Any, close: float, size: float = 0.0) -> bool:
    """Whether two values are equal up to `close` of the larger one, or of `size`, the largest number of their list."""
    if isinstance(a, list) and isinstance(b, list):
        size = max((abs(x) for x in a if isinstance(x, float)), default=0.0)
        return len(a) == len(b) and all(_alike(x, y, close, size) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key], close) for key in a)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= close * max(abs(a), abs(b), size) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)
