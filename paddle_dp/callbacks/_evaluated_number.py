"""The number of the evaluations that a callback watches, and the comparison of two of its values."""

from __future__ import annotations

import math

from paddle_dp.errors import UsageError
from paddle_dp.scores import smaller_is_better
from paddle_dp.train import Evaluation, Moment
from paddle_dp.train.evaluation import unknown_number


def better(name: str, value: float, than: float | None, by: float = 0.0) -> bool:
    """True if `value` is better than `than` by more than `by`. Any finite value is better than None or a value that is
    not finite; other values never are."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    return value < than - by if smaller_is_better(name) else value > than + by


def refuse_unknown(name: str, moment: Moment, setting: str) -> None:
    """Raises UsageError that names the recipe's `setting` if evaluations will have no number `name`. Collective."""
    if name != "loss" and (names := moment.trainer.evaluation_names()) and name not in names:
        raise UsageError(unknown_number(name, names, f"callbacks.{setting}"))


def read(name: str, evaluation: Evaluation, setting: str) -> float:
    """The number `name`. Raises UsageError that names the recipe's `setting` if the evaluation lacks it."""
    if name not in evaluation.numbers:
        raise UsageError(unknown_number(name, evaluation.numbers, f"callbacks.{setting}"))
    return float(evaluation.numbers[name])
