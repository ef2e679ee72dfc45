"""Area under the ROC curve, of two classes, or the mean over classes or labels (scikit-learn's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.metrics._base import OfClasses, mean_over_columns, scikit_learn


class Auc(OfClasses):
    """The mean over classes, each against all others, or over labels; those with samples of one kind only are left
    out."""

    names = ("auc",)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        score = scikit_learn("roc_auc_score")
        return {"auc": mean_over_columns(outputs, targets, self.ignored, score, needs_negatives=True)}


@dataclass(frozen=True, kw_only=True)
class Config:
    ignore_index: int | None = None
    """Class number of targets that do not count; the loss's by default."""

    def build(self) -> Auc:
        return Auc(self.ignore_index)
