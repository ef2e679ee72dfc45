"""The tolerance of a proof: the distance of two sides that rounding explains. Does not import paddle.

Nothing in it is chosen for a model: the noise of a quantity is measured (proof.noise), and `LARGEST_R` times it is the
tolerance. compare has the formulas.
"""

from __future__ import annotations

import numpy as np

# The largest distance that counts as the same, in units of the noise: K of the formulas. Correct layouts give about 1,
# and tools/proof_margins.py prints how far above this small faults are.
LARGEST_R = 8.0
# F/|g| above which an element counts as noise. Measured: at most 0.07 for true gradients, at least 1.2 for others.
NOISE_LIMIT = 0.3
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Part of a quantity that rounding stays below: about half of the digits. Low precisions are too coarse for a bound.
ROUNDING_BOUND = {"float64": 2.0**-22, "float32": 2.0**-8}
# A parameter's part of the whole gradient below which it counts as zero; it matters for quantities without noise.
ZERO_FRACTION = dict.fromkeys(EPS, 2.0**-40) | {"float64": 2.0**-53}
VISIBLE_FAULT = 0.1  # the fault, as a part of any parameter's gradient, that must show


def is_same(r: float) -> bool:
    """Whether rounding explains a distance of `r` units."""
    return r <= LARGEST_R


def unit_of(noise: float, size: float, eps: float, rounded: float = 0.0) -> float:
    """The unit of r for a quantity of this size: noise, or one unit in the last place, plus rounding bound / K."""
    return max(noise, eps * size) + rounded / LARGEST_R


def least_of_a_score(dtype: str, samples: int) -> float:
    """The smallest floor of a score over `samples`: rounding may swap two tied classes, except in float64."""
    return 0.0 if dtype == "float64" else 2.0 / (LARGEST_R * max(samples, 1))


def arithmetic_eps(dtype: str) -> float:
    """The epsilon of the optimizer's arithmetic, which is float32 at least."""
    return min(EPS[dtype], EPS["float32"])


def undetermined(gradient: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """A mask where one process's noise is more than 0.3 of the gradient; not where both are 0."""
    return (noise > NOISE_LIMIT * np.abs(gradient)) & (noise > 0)


def difference(a: float, b: float) -> float:
    """|a - b|: 0 for the same infinity or two NaN, infinite if only one of them is finite."""
    if a == b or (np.isnan(a) and np.isnan(b)):
        return 0.0
    distance = abs(a - b)
    return distance if np.isfinite(distance) else float("inf")


def ratio(distance: float, allowed: float) -> float:
    """distance / allowed; 0 if the distance is 0."""
    if distance == 0:
        return 0.0
    return distance / allowed if allowed > 0 else float("inf")
