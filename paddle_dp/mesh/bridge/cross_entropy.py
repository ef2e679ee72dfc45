"""Cross-entropy over logits whose columns (classes) are spread over the seats of a group; no seat sees them all."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from paddle_dp.mesh.bridge.collectives import reduced

if TYPE_CHECKING:
    import paddle


def cross_entropy(
    logits: paddle.Tensor, label: paddle.Tensor, seats: Any, ignore_index: int = -100
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The loss [..., 1] and this seat's columns of the softmax, computed in float32, in the type of `logits`.

    `logits` is [..., classes / seats], `label` [...] or [..., 1] with whole-model class numbers. Losses are exact also
    above 64, where Paddle's own are cut off.
    """
    label = label.unsqueeze(-1) if label.ndim == logits.ndim - 1 else label
    loss, softmax = _layer().apply(logits, label, seats, ignore_index)
    return loss, softmax


def _hot(label: paddle.Tensor, seats: Any, classes: int) -> paddle.Tensor:
    """[..., classes]: 1 where this seat holds the label's column; all 0 where another seat does."""
    import paddle

    # 0 and classes + 1 stand for the seats before and behind this one, and are cut off.
    local = (label.astype("int64") - seats.rank() * classes).clip(-1, classes).squeeze(-1) + 1
    return paddle.nn.functional.one_hot(local, classes + 2)[..., 1 : classes + 1].astype("float32")


@cache
def _layer() -> Any:
    from paddle.autograd import PyLayer
    from paddle.base import core

    class CrossEntropy(PyLayer):
        @staticmethod
        def forward(ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, seats: Any, ignore: int) -> Any:
            z, classes = logits.astype("float32"), logits.shape[-1]
            z = z - reduced(seats, z.max(-1, keepdim=True), core.ReduceOp.MAX)
            e = z.exp()
            total = reduced(seats, e.sum(-1, keepdim=True))
            counts = (label != ignore).astype("float32")
            score = reduced(seats, (z * _hot(label, seats, classes)).sum(-1, keepdim=True))
            ctx.softmax, ctx.label, ctx.counts = e / total, label, counts
            ctx.seats, ctx.dtype = seats, logits.dtype
            loss = (total.log() - score) * counts
            return loss.astype(logits.dtype), ctx.softmax.astype(logits.dtype)

        @staticmethod
        def backward(ctx: Any, of_loss: paddle.Tensor, *_: Any) -> paddle.Tensor:
            hot = _hot(ctx.label, ctx.seats, ctx.softmax.shape[-1])
            return ((ctx.softmax - hot) * ctx.counts * of_loss.astype("float32")).astype(ctx.dtype)

    return CrossEntropy
