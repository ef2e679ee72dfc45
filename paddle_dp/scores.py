"""Scores by their names and counts: whether a smaller one is better, and how far chance may have moved a share."""

from __future__ import annotations

import math

# A number with one of these words in its name should fall; every other number should rise.
_COSTS = (
    "loss", "error", "perplexity", "ppl", "bits", "nll", "entropy", "distance", "mse", "msle", "mae", "mape",
    "rmse", "rmsle", "wer", "cer", "ter", "eer", "fpr", "fnr", "ece", "brier",
)  # fmt: skip
_Z = 1.959964  # standard deviations of a normal distribution around the middle 95 %


def smaller_is_better(name: str) -> bool:
    """True if `name` is a cost: loss, error_rate, val_mse are; acc1, f1, iou are not."""
    return any(token in _COSTS for token in name.lower().replace("-", "_").split("_"))


def standard_error(share: float, count: int) -> float:
    """The binomial standard error of a share of `count` independent samples."""
    return math.sqrt(max(share * (1 - share), 0.0) / count)


def interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` independent samples: Wilson's score interval, which is not empty at 0
    and 1 either (Wilson 1927; Brown, Cai, DasGupta 2001)."""
    z = _Z**2 / count
    middle = (share + z / 2) / (1 + z)
    half = _Z / (1 + z) * math.sqrt(max(share * (1 - share), 0.0) / count + z / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
