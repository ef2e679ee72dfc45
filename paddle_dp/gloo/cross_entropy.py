"""Cross-entropy over logits whose columns (classes) are spread over the ranks of a group, without gathering them."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer
from paddle.base import core

from paddle_dp.gloo.collectives import reduced


def cross_entropy(
    logits: paddle.Tensor, label: paddle.Tensor, process_group: Any, ignore_index: int = -100
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The loss [..., 1] and this rank's columns of the softmax, computed in float32 at least, in the dtype of `logits`.

    `logits` is [..., classes / ranks], `label` [...] or [..., 1] with class numbers of the whole model. Losses above 64
    are exact; Paddle's own are cut off there.
    """
    label = label.unsqueeze(-1) if label.ndim == logits.ndim - 1 else label
    loss, softmax = CrossEntropy.apply(logits, label, process_group, ignore_index)
    return loss, softmax


def _place(label: paddle.Tensor, process_group: Any, classes: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The label's column on this rank [..., 1], and whether this rank holds it; if not, the column is arbitrary."""
    local = label.astype("int64") - process_group.rank() * classes
    here = (local >= 0).logical_and(local < classes)
    return local.clip(0, classes - 1), here


class CrossEntropy(PyLayer):
    """At most three tensors as large as the logits are alive at once: with many classes they dominate the memory."""

    @staticmethod
    def forward(
        ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, process_group: Any, ignore: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        wide = "float64" if logits.dtype == paddle.float64 else "float32"
        z, classes = logits.astype(wide), logits.shape[-1]
        z = z - reduced(process_group, z.max(-1, keepdim=True), core.ReduceOp.MAX)
        column, is_here = _place(label, process_group, classes)
        here = is_here.astype(wide)
        score = reduced(process_group, z.take_along_axis(column, -1, broadcast=False) * here)
        softmax = z.exp_()
        # sum() adds one number after another: over a million of them float32 is off by 1e-3.
        total = reduced(process_group, softmax.sum(-1, keepdim=True, dtype="float64")).astype(wide)
        softmax.multiply_(1 / total)
        counts = (label != ignore).astype(wide)
        ctx.softmax, ctx.column, ctx.here, ctx.counts = softmax, column, here, counts
        ctx.dtype = logits.dtype
        loss = (total.log() - score) * counts
        return loss.astype(logits.dtype), softmax.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, of_loss: paddle.Tensor, *_: Any) -> paddle.Tensor:
        each = ctx.counts * of_loss.astype(ctx.softmax.dtype)
        gradient = ctx.softmax * each
        gradient.put_along_axis_(ctx.column, -each * ctx.here, -1, reduce="add", broadcast=False)
        return gradient.astype(ctx.dtype)
