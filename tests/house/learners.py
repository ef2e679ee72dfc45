"""The task of a small model in a line, and the numbers of a learner's updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import paddle

from paddle_dp.learner import Precision, Task
from paddle_dp.losses.cross_entropy import CrossEntropy


def task_of(
    model: Any,
    loss: Any = None,
    optimizer: str = "SGD",
    rate: float = 0.1,
    dtype: str = "float32",
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Task:
    """A task that any strategy can place: cross entropy and SGD by default. `settings` are more of the optimizer's,
    `more` are the task's."""
    kind = getattr(paddle.optimizer, optimizer)
    return Task(
        model=model,
        loss=loss or CrossEntropy(),
        optimizer=lambda _, named: kind(rate, parameters=[p for _, p in named], **(settings or {})),
        **{"precision": Precision(dtype=dtype), **more},
    )


def numbers_of(learner: Any, batches: Iterable[Any]) -> list[list[float]]:
    """[loss, gradient norm] of an update with each batch."""
    metrics = [learner.train_batch(batch, collect_metrics=True) for batch in batches]
    return [[each["loss"], each["gradient_norm"]] for each in metrics]
