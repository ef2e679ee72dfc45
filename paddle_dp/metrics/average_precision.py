"""Average precision, the mean over classes or labels (mAP of multi-label classifiers; scikit-learn's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.metrics._base import OfClasses, mean_over_columns, scikit_learn


class AveragePrecision(OfClasses):
    """The mean over classes or labels with a positive sample."""

    names = ("average_precision",)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        score = scikit_learn("average_precision_score")
        mean = mean_over_columns(outputs, targets, self.ignored, score, needs_negatives=False)
        return {"average_precision": mean}


@dataclass(frozen=True, kw_only=True)
class Config:
    ignore_index: int | None = None
    """Class number of targets that do not count; the loss's by default."""

    def build(self) -> AveragePrecision:
        return AveragePrecision(self.ignore_index)
