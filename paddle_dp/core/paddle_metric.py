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
        metric.reset()
        try:
            empty = _as_list(metric.accumulate())
        except Exception:  # noqa: BLE001 - many divide by the number of samples, which is 0 now
            empty = []
        self.names = self._names(len(empty))

    def _names(self, numbers: int) -> tuple[str, ...]:
        """The names of so many numbers; 0: not known yet."""
        name, more = self._metric.name(), getattr(self._metric, "names", None)
        names = (name,) if isinstance(name, str) else tuple(name)
        if numbers in (0, len(names)):
            return names
        if isinstance(more, (list, tuple)) and len(more) == numbers:
            return tuple(map(str, more))
        raise UsageError(
            f"its name() is {', '.join(names)}, and it has {numbers} numbers: name each, with "
            'metric.names = ("accuracy", "f1", …).'
        )

    def __call__(self, outputs: Any, targets: Any) -> Mapping[str, float]:
        self._metric.reset()
        tensors = [paddle.to_tensor(x) for x in leaves((outputs, targets))]
        values = [*map(np.asarray, _as_list(self._metric.compute(*tensors)))]
        if (
            isinstance(self._metric, (Auc, Precision, Recall))
            and not ((values[0] >= 0) & (values[0] <= 1)).all()
        ):
            raise UsageError(
                f"{type(self._metric).__name__} takes probabilities, and there are outputs below 0 or above 1. Take "
                "the metric auc or classification, which take logits (docs/metrics.md)."
            )
        self._metric.update(*values)
        numbers = _as_list(self._metric.accumulate())
        self._metric.reset()
        return dict(zip(self._names(len(numbers)), numbers, strict=True))


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
