"""The number of the evaluations that a callback watches, and the comparison of two of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.scores import smaller_is_better
from paddle_dp.train import Evaluation, Moment


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
        raise UsageError(_unknown(name, names, setting))


def read(name: str, evaluation: Evaluation, setting: str) -> float:
    """The number `name`. Raises UsageError that names the recipe's `setting` if the evaluation lacks it."""
    if name not in evaluation.numbers:
        raise UsageError(_unknown(name, evaluation.numbers, setting))
    return float(evaluation.numbers[name])


def _unknown(name: str, known: Iterable[str], setting: str) -> str:
    known = set(known)
    bare = re.sub(r"^(val|eval|valid|test)[_/-]?", "", name.lower())
    meant = {"acc": "acc1", "accuracy": "acc1", "top1": "acc1", "top5": "acc5"}.get(bare, bare)
    hint = f" Did you mean '{meant}'?" if meant in known else ""
    hint = (
        hint + f" They have {', '.join(sorted(known))}." if hint else did_you_mean(name, known, "They have")
    )
    why = (
        " Precision, recall and F1 of the model are the metric classification: metrics: [{use: classification}]."
        if name.lower() in ("f1", "precision", "recall")
        else ""
    )
    return f"callbacks.{setting}: evaluations of this model have no number '{name}'.{why}{hint}"
