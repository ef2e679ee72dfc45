"""Metrics of `paddle.metric`, as functions of all held-out samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle.metric import Auc, Metric, Precision, Recall

from paddle_dp.batch import leaves
from paddle_dp.errors import UsageError


class PaddleMetric:
    """A `paddle.metric.Metric` as a function of (outputs, targets): it is reset, and gets all held-out samples at once,
    as `paddle.Model.evaluate` would give it those of one batch. Its numbers are then the same on any number of ranks.

    Raises UsageError for one whose `name()` does not name each of its numbers.
    """

    def __init__(self, metric: Metric):
        self._metric = metric
        names = getattr(metric, "names", None) or metric.name()
        self.names: tuple[str, ...] = (names,) if isinstance(names, str) else tuple(names)
        metric.reset()
        if (number := len(_as_list(metric.accumulate()))) != len(self.names):
            raise UsageError(
                f"its name() is {', '.join(self.names)}, and it has {number} numbers: name each, with "
                'metric.names = ("accuracy", "f1", …).'
            )

    def __call__(self, outputs: Any, targets: Any) -> Mapping[str, float]:
        if isinstance(self._metric, (Auc, Precision, Recall)) and not _are_probabilities(outputs):
            raise UsageError(
                f"paddle.metric.{type(self._metric).__name__} takes probabilities, and there are outputs below 0 or "
                "above 1. Take the metric auc or classification, which take logits (docs/metrics.md)."
            )
        self._metric.reset()
        tensors = [paddle.to_tensor(x) for x in leaves((outputs, targets))]
        self._metric.update(*map(np.asarray, _as_list(self._metric.compute(*tensors))))
        numbers = _as_list(self._metric.accumulate())
        self._metric.reset()
        return dict(zip(self.names, numbers, strict=True))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _are_probabilities(outputs: Any) -> bool:
    return all(((x >= 0) & (x <= 1)).all() for x in leaves(outputs))
