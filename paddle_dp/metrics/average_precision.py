"""Average precision, the mean over classes or labels (mAP of multi-label classifiers; scikit-learn's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.metrics._base import mean_over_columns, scikit_learn


class AveragePrecision:
    """The mean over classes or labels with a positive sample."""

    names = ("average_precision",)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        score = scikit_learn("average_precision_score")
        return {"average_precision": mean_over_columns(outputs, targets, score, "average_precision", False)}


@dataclass(frozen=True, kw_only=True)
class Config:
    def build(self) -> AveragePrecision:
        return AveragePrecision()
