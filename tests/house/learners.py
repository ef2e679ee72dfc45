"""The task of a small model in a line, and the numbers of a learner's updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import paddle
from paddle import nn

from paddle_dp.learner import Precision, Task
from paddle_dp.losses.cross_entropy import CrossEntropy


class Chain(nn.Layer):
    """Blocks, one behind the other."""

    def __init__(self, *blocks: nn.Layer):
        super().__init__()
        self.blocks = nn.LayerList(blocks)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


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


def stored_weights(learner: Any) -> dict[str, Any]:
    """The parameters, or parts of them, that this rank stores."""
    placed = learner.placed
    return {name: p.numpy() for name, p in placed.named_parameters() if placed.is_stored(p)}
