"""Losses over scores whose classes are cut over the tensor axis: nobody gathers the scores to learn from them."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.errors import UsageError


class CutLoss:
    """A cross-entropy's totals, counts and scores, from scores [n, …, classes / seats].

    Raises UsageError for a loss that cannot be computed from parts.
    """

    def __init__(self, loss: Any, group: Any):
        if getattr(loss, "smoothing", None) != 0 or hasattr(loss, "count"):
            raise UsageError(
                "strategy.tensor cuts the classes of this model's scores, which cross_entropy without label_smoothing "
                "and ignore_index can learn from. Set both to their defaults, or strategy.tensor=1."
            )
        self.loss, self.group = loss, group
        self._parallel = fleet.meta_parallel.ParallelCrossEntropy(mp_group=group)

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total over samples, how many): the targets of one sample are averaged, as in cross_entropy."""
        losses = self._parallel(outputs.astype("float32"), targets.unsqueeze(-1))
        each = losses.size // targets.shape[0]
        return losses.sum() / each, targets.shape[0]

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The whole loss's scores; here, and only here, the parts are gathered. Collective over the axis."""
        return self.loss.scores(self.gather(outputs), targets)

    def gather(self, outputs: paddle.Tensor) -> paddle.Tensor:
        return mp_ops._c_concat(outputs, group=self.group)
