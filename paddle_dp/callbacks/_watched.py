"""The number of the evaluations that a callback watches, and whether one value of it is better than another."""

from __future__ import annotations

import math

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.train import Evaluation

# A number with one of these words in its name should fall; every other number should rise.
_COSTS = ("loss", "error", "perplexity", "distance", "mse", "mae", "rmse")


def smaller_is_better(name: str) -> bool:
    """Whether «name» is a cost: loss, error_rate, val_mse are; acc1, f1, iou are not."""
    return any(word in _COSTS for word in name.lower().replace("-", "_").split("_"))


def better(name: str, value: float, than: float | None, by: float = 0.0) -> bool:
    """Whether `value` is better than `than` by more than `by`; any is better than None, none that is not finite is."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    return value < than - by if smaller_is_better(name) else value > than + by


def read(name: str, found: Evaluation, setting: str) -> float:
    """The number `name`. Raises UsageError that names the recipe's `setting` if there is no such number."""
    if name not in found.numbers:
        hint = did_you_mean(name, found.numbers)
        raise UsageError(f"{setting}: evaluations of this model have no number '{name}'.{hint}")
    return float(found.numbers[name])
