"""Precision, recall and F1 over all classes, or all labels: macro, micro or weighted means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paddle_dp.errors import UsageError
from paddle_dp.metrics._base import OfClasses, are_labels, check_labels, class_rows
from paddle_dp.tensors import holds_nan

Average = Literal["macro", "micro", "weighted"]


class Classification(OfClasses):
    """Counts for each class the samples that are of it and predicted (hits), predicted, and of it."""

    names = ("precision", "recall", "f1")

    def __init__(self, average: Average, ignored: int | None):
        super().__init__(ignored)
        self._average = average

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """{"counts" [3, classes]: hits, predicted, true; NaN if a score is; "labels": their number, 0 for classes;
        "logits": the number of outputs that are no probabilities}."""
        import paddle

        if are_labels(outputs, targets):  # yes or no for each, as binary_cross_entropy takes it
            rows = outputs.astype("float32").reshape([len(outputs), -1])
            check_labels(targets.numpy())
            predicted, true = rows > 0, targets.reshape(rows.shape).astype("float32") == 1
            chosen = [predicted.logical_and(true), predicted, true]
            each = [c.astype("int64").sum(0).numpy().reshape(-1) for c in chosen]
            labels, logits = rows.size, (rows < 0).logical_or(rows > 1).astype("int64").sum()
        else:
            rows, numbers = class_rows(outputs, targets, self.ignored)
            best, labels, logits = rows.argmax(-1), 0, 0
            chosen = [best[best == numbers], best, numbers]
            none, size = [0] * rows.shape[-1], rows.shape[-1]
            each = [paddle.bincount(c, minlength=size).numpy() if len(c) else none for c in chosen]
        counts = np.stack(each) + (math.nan if holds_nan(rows) else 0)
        return {"counts": counts, "labels": labels, "logits": logits}

    def compute(self, sums: Any) -> dict[str, float]:
        """As scikit-learn's: 0 where a denominator is 0; a class that is neither predicted nor true does not count.

        Raises UsageError if the outputs of labels are probabilities.
        """
        if sums["labels"] and not sums["logits"]:
            raise UsageError(
                "a label is predicted by an output above 0, and all outputs are from 0 to 1: give logits."
            )
        hits, predicted, true = sums["counts"].astype("float64")
        if self._average == "micro":
            hits, predicted, true = (c.sum(keepdims=True) for c in (hits, predicted, true))
        elif not sums["labels"]:
            hits, predicted, true = (c[predicted + true != 0] for c in (hits, predicted, true))
        weights = true if self._average == "weighted" else np.ones_like(true)
        each = [hits / np.where(d == 0, 1, d) for d in (predicted, true, (predicted + true) / 2)]
        total = weights.sum() or 1  # 0 where no label is positive, or no target counts
        return {name: float((s * weights).sum() / total) for name, s in zip(self.names, each, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Config:
    average: Average = "macro"
    """The mean: `macro`, over classes; `micro`, over samples; `weighted`, over classes by their samples."""

    ignore_index: int | None = None
    """Class number of targets that do not count; the loss's by default."""

    def build(self) -> Classification:
        return Classification(self.average, self.ignore_index)
