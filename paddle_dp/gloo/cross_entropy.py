"""Cross-entropy over logits whose columns (classes) are spread over the seats of a group; no seat sees them all."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from paddle_dp.gloo.collectives import reduced

if TYPE_CHECKING:
    import paddle


def cross_entropy(
    logits: paddle.Tensor, label: paddle.Tensor, seats: Any, ignore_index: int = -100
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The loss [..., 1] and this seat's columns of the softmax, computed in float32 at least, in the type of `logits`.

    `logits` is [..., classes / seats], `label` [...] or [..., 1] with whole-model class numbers. Losses are exact also
    above 64, where Paddle's own are cut off.
    """
    label = label.unsqueeze(-1) if label.ndim == logits.ndim - 1 else label
    loss, softmax = _layer().apply(logits, label, seats, ignore_index)
    return loss, softmax


def _place(label: paddle.Tensor, seats: Any, classes: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The label's column on this seat [..., 1], and whether this seat holds it; another column where not."""
    local = label.astype("int64") - seats.rank() * classes
    here = (local >= 0).logical_and(local < classes)
    return local.clip(0, classes - 1), here


@cache
def _layer() -> Any:
    import paddle
    from paddle.autograd import PyLayer
    from paddle.base import core

    class CrossEntropy(PyLayer):
        """At most three tensors as large as the logits are alive at once: with many classes, they are the memory."""

        @staticmethod
        def forward(ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, seats: Any, ignore: int) -> Any:
            wide = "float64" if logits.dtype == paddle.float64 else "float32"
            z, classes = logits.astype(wide), logits.shape[-1]
            z = z - reduced(seats, z.max(-1, keepdim=True), core.ReduceOp.MAX)
            column, held = _place(label, seats, classes)
            here = held.astype(wide)
            score = reduced(seats, z.take_along_axis(column, -1, broadcast=False) * here)
            softmax = z.exp_()
            # sum() adds one number after another: over a million of them float32 is off by 1e-3.
            total = reduced(seats, softmax.sum(-1, keepdim=True, dtype="float64")).astype(wide)
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

    return CrossEntropy
