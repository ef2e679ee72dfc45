"""Precision, recall and F1 of all classes, or of all labels: macro, micro or weighted means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paddle_dp.metrics._base import class_rows, is_multi_label

Average = Literal["macro", "micro", "weighted"]


class Classification:
    """Counts for each class the samples that are of it and predicted (hits), predicted, and of it."""

    names = ("precision", "recall", "f1")

    def __init__(self, average: Average, ignored: int | None):
        self._average, self._ignored = average, ignored

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """{"counts" int64 [3, classes]: hits, predicted, true; "labels": 1 if they are labels}."""
        import paddle

        if is_multi_label(outputs, targets):  # yes or no for each label, as binary_cross_entropy takes it
            predicted, true = outputs > 0, targets > 0.5
            counted = [(predicted.logical_and(true)), predicted, true]
            return {
                "counts": np.stack([c.astype("int64").sum(0).numpy().reshape(-1) for c in counted]),
                "labels": 1,
            }
        scores, numbers = class_rows(outputs, targets, self._ignored, "classification")
        classes, best = scores.shape[-1], scores.argmax(-1)
        chosen = [best[best == numbers], best, numbers]
        counts = [
            paddle.bincount(c, minlength=classes).numpy() if len(c) else np.zeros(classes, "int64")
            for c in chosen
        ]
        return {"counts": np.stack(counts), "labels": 0}

    def compute(self, sums: Any) -> dict[str, float]:
        """As scikit-learn's: 0 where a denominator is 0; a class that is neither predicted nor true does not count."""
        hits, predicted, true = sums["counts"].astype("float64")
        if self._average == "micro":
            hits, predicted, true = (
                hits.sum(keepdims=True),
                predicted.sum(keepdims=True),
                true.sum(keepdims=True),
            )
        elif not sums["labels"]:
            hits, predicted, true = (c[(predicted + true) > 0] for c in (hits, predicted, true))
        weights = true if self._average == "weighted" else np.ones_like(true)
        each = (
            hits / np.maximum(predicted, 1),
            hits / np.maximum(true, 1),
            2 * hits / np.maximum(predicted + true, 1),
        )
        return {
            name: float((s * weights).sum() / max(weights.sum(), 1))
            for name, s in zip(self.names, each, strict=True)
        }


@dataclass(frozen=True, kw_only=True)
class Config:
    average: Average = "macro"
    """The mean: `macro`, over classes; `micro`, over samples; `weighted`, over classes by their samples."""

    ignore_index: int | None = None
    """Class number of targets that do not count."""

    def build(self) -> Classification:
        return Classification(self.average, self.ignore_index)
