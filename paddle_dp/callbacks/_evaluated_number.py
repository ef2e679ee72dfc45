"""The number of the evaluations that a callback watches, and the comparison of two of its values."""

from __future__ import annotations

import math
import sys

from paddle_dp.callbacks.evaluate import Evaluate
from paddle_dp.errors import UsageError
from paddle_dp.scores import smaller_is_better
from paddle_dp.train import Evaluation, Moment, Run
from paddle_dp.train.evaluation import unknown_number


def better(name: str, value: float, than: float | None, by: float = 0.0) -> bool:
    """True if `value` is better than `than` by more than `by`. Any finite value is better than None or a value that is
    not finite; other values never are."""
    if not math.isfinite(value):
        return False
    if than is None or not math.isfinite(than):
        return True
    return value < than - by if smaller_is_better(name) else value > than + by


def refuse_unknown(name: str, run: Run, moment: Moment, setting: str) -> None:
    """Raises UsageError that names the recipe's `setting` if no evaluation will have a number `name`. Prints a line if
    only code of the user's can evaluate. Collective."""
    trainer, key, superfluous = moment.trainer, f"callbacks.{setting}", setting.removesuffix(".watch")
    if run.test_loader is None:
        raise UsageError(
            f"{key}: {name} is a number of held-out samples, and there are none: give the data set a test split, or "
            f"leave {superfluous} out."
        )
    if name != "loss" and name not in (names := trainer.evaluation_names()):
        raise UsageError(unknown_number(name, names, key))
    if trainer.plateau is not None or any(isinstance(callback, Evaluate) for callback in trainer.callbacks):
        return
    remedy = f"add evaluate to the callbacks, or leave {superfluous} out."
    packaged = all(type(callback).__module__.startswith("paddle_dp.") for callback in trainer.callbacks)
    if run.recipe is not None and packaged:
        raise UsageError(f"{key}: nothing evaluates {name}: {remedy}")
    if run.mesh.is_main:
        sentence = f"{key}: nothing evaluates {name}, unless your code calls trainer.evaluate(): {remedy}"
        print(sentence, file=sys.stderr, flush=True)


def read(name: str, evaluation: Evaluation, setting: str) -> float:
    """The number `name`. Raises UsageError that names the recipe's `setting` if the evaluation lacks it."""
    if name not in evaluation.numbers:
        raise UsageError(unknown_number(name, evaluation.numbers, f"callbacks.{setting}"))
    return float(evaluation.numbers[name])
