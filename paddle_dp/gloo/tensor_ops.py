"""Collectives of tensor-parallel layers, as PyLayers: Paddle's kernels for them are missing on CPUs.

f (`c_identity`) and g (`mp_allreduce`) are Megatron's conjugate pair (Shoeybi et al. 2019, section 3). The parallel
cross-entropy takes logits with columns (classes) sharded over the ranks of a group, and gathers none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer
from paddle.base import core

from paddle_dp.adjoint import WithAdjoint
from paddle_dp.gloo.collectives import gathered, reduced
from paddle_dp.gloo.originals import process_group_of
from paddle_dp.gloo.patch import Patch, look_up

Collective = Callable[[Any, paddle.Tensor], paddle.Tensor]  # of a process group


def cross_entropy(
    logits: paddle.Tensor, label: paddle.Tensor, process_group: Any, ignore_index: int = -100
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the loss [..., 1] and this rank's columns of the softmax, in the dtype of `logits`. Collective.

    `logits` is [..., classes / ranks], `label` [...] or [..., 1] with global class indices. Both are computed in
    float32 or wider. Losses above 64 are exact; Paddle clips them there.
    """
    label = label.unsqueeze(-1) if label.ndim == logits.ndim - 1 else label
    loss, softmax = VocabParallelCrossEntropy.apply(logits, label, process_group, ignore_index)
    return loss, softmax


def _local_column(
    label: paddle.Tensor, process_group: Any, classes: int
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Returns the label's column on this rank [..., 1], and a mask of labels that this rank holds.

    Columns outside the mask are arbitrary.
    """
    local = label.astype("int64") - process_group.rank() * classes
    here = (local >= 0).logical_and(local < classes)
    return local.clip(0, classes - 1), here


class VocabParallelCrossEntropy(PyLayer):
    """Cross-entropy over sharded classes. At most three tensors of the logits' size are alive at once, as they dominate
    the memory with many classes."""

    @staticmethod
    def forward(
        ctx: Any, logits: paddle.Tensor, label: paddle.Tensor, process_group: Any, ignore: int
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        wide = "float64" if logits.dtype == paddle.float64 else "float32"
        z, classes = logits.astype(wide), logits.shape[-1]
        z = z - reduced(process_group, z.max(-1, keepdim=True), core.ReduceOp.MAX)
        column, is_here = _local_column(label, process_group, classes)
        here = is_here.astype(wide)
        scores = z.take_along_axis(column, -1, broadcast=False)  # -inf of a masked class is no zero times 0
        score = reduced(process_group, paddle.where(is_here, scores, paddle.zeros_like(scores)))
        softmax = z.exp_()
        # sum() adds sequentially: over a million numbers float32 is off by 1e-3.
        total = reduced(process_group, softmax.sum(-1, keepdim=True, dtype="float64")).astype(wide)
        softmax.multiply_(1 / total)
        counts = (label != ignore).astype(wide)
        ctx.softmax, ctx.column, ctx.here, ctx.counts = softmax, column, here, counts
        ctx.dtype = logits.dtype
        loss = paddle.where(label != ignore, total.log() - score, paddle.zeros_like(score))
        return loss.astype(logits.dtype), softmax.astype(logits.dtype)

    @staticmethod
    def backward(ctx: Any, loss_gradient: paddle.Tensor, *_: Any) -> paddle.Tensor:
        each = ctx.counts * loss_gradient.astype(ctx.softmax.dtype)
        gradient = ctx.softmax * each
        gradient.put_along_axis_(ctx.column, -each * ctx.here, -1, reduce="add", broadcast=False)
        return gradient.astype(ctx.dtype)


def all_columns(process_group: Any, tensor: paddle.Tensor) -> paddle.Tensor:
    """Gathers the ranks' shards of the last dim, in the order of the group. Collective."""
    return paddle.concat(gathered(process_group, tensor), axis=-1)


def local_columns(process_group: Any, tensor: paddle.Tensor) -> paddle.Tensor:
    """Returns a copy of this rank's equal shard of the last dim."""
    return paddle.split(tensor, process_group.size(), axis=-1)[process_group.rank()].clone()


def _is_member(group: Any) -> bool:
    return group is None or group.is_member()


def c_identity(tensor: paddle.Tensor, group: Any = None, *_: Any, **__: Any) -> Any:
    """Applies Megatron's f: the identity in forward, the sum of the gradients in backward."""
    return _applied(_copied, reduced, tensor, group)


def mp_allreduce(tensor: paddle.Tensor, op: Any = None, group: Any = None, *_: Any, **__: Any) -> Any:
    """Applies Megatron's g: the sum over the ranks in forward, as in fleet whatever `op` is, and the identity in
    backward."""
    return _applied(reduced, _copied, tensor, group)


def c_concat(tensor: paddle.Tensor, group: Any = None) -> Any:
    """Gathers all ranks' columns in forward; keeps this rank's columns of the gradient in backward."""
    return _applied(all_columns, local_columns, tensor, group)


def c_split(tensor: paddle.Tensor, group: Any = None) -> Any:
    """Keeps this rank's columns in forward; gathers all ranks' columns of the gradient in backward.

    Fleet's backward (`c_split_eager`, 3.3.1) gathers along dim 0, which is wrong on every device.
    """
    return _applied(local_columns, all_columns, tensor, group)


def _applied(function: Collective, adjoint: Collective, tensor: paddle.Tensor, group: Any) -> Any:
    """Returns None on a rank outside the group, as fleet does."""
    if not _is_member(group):
        return None
    process_group = process_group_of(group)
    return WithAdjoint.apply(tensor, partial(function, process_group), partial(adjoint, process_group))


def _copied(process_group: Any, tensor: paddle.Tensor) -> paddle.Tensor:
    return tensor.clone()


def c_softmax_with_cross_entropy(
    logits: paddle.Tensor,
    label: paddle.Tensor,
    group: Any = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> Any:
    """Returns the loss [..., 1] for this rank's columns of the logits [..., classes / ranks]. Collective."""
    if not _is_member(group):
        return None
    loss, softmax = cross_entropy(logits, label, process_group_of(group), ignore_index)
    return (loss, softmax) if return_softmax else loss


def lookup_table(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_c_lookup_table`: returns rows [..., width] for indices [...] that this rank's table holds, else zeros.

    On a CPU the kernel's gradient of a float64 table is wrong (3.3.1): it clears only float32's number of bytes, the
    first half, and adds to uninitialized memory in the second. Float64 uses an ordinary embedding and a mask instead.
    """

    @wraps(original)
    def lookup(
        table: paddle.Tensor, index: paddle.Tensor, start_index: int = 0, *rest: Any, **named: Any
    ) -> Any:
        if table.dtype != paddle.float64:
            return original(table, index, start_index, *rest, **named)
        local, size = index - start_index, table.shape[0]
        here = (local >= 0).logical_and(local < size).unsqueeze(-1)
        return F.embedding(local.clip(0, size - 1), table) * here.astype(table.dtype)

    return lookup


def patches() -> Iterator[Patch]:
    mpu = "paddle.distributed.fleet.layers.mpu.mp_ops"
    table = lookup_table(look_up(mpu)._c_lookup_table)  # type: ignore[union-attr]
    yield Patch(
        mpu, "_c_lookup_table", table, "in float64 the gradient of half the table is uninitialized memory"
    )
    for function in (c_identity, mp_allreduce, c_concat, c_split, c_softmax_with_cross_entropy):
        name = f"_{function.__name__}"
        symptom = f"{function.__name__} has no CPU kernel (NotFound / Unimplemented in forward or backward)"
        yield Patch(mpu, name, function, symptom)
        # paddle.distributed has some of them under a second name.
        yield Patch("paddle.distributed.collective", name, function, symptom, missing="skip")
