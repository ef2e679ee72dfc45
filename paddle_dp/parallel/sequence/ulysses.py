"""The sequence axis: every rank along it holds its stretch of the same samples' tokens, for sequences too long for one.

Everything in a model but attention works on each token alone. Around attention, ranks trade stretches of all heads for
all tokens of some heads, and back behind it (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509): so positions inside
attention, rotary ones too, count from the first token as ever. The first block sees whole samples and its outputs are
dealt out, so learned positions need no offset either. Paddle 3.3.1 has the groups for this axis, and no such exchange.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.autograd import PyLayer
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.errors import UsageError
from paddle_dp.parallel.blocks import settle
from paddle_dp.parallel.dropout import within_slice
from paddle_dp.parallel.loss import Count, Loss, number
from paddle_dp.part.annotation import attends_of


def along_sequence(model: nn.Layer, loss: Loss, group: Any) -> tuple[nn.Layer, Loss]:
    """The same model and loss on this seat's stretch of every sequence. In place.

    Raises UsageError for a model that does not name its attention, or a loss that cannot be computed from stretches.
    """
    attending = [layer for layer in model.sublayers(include_self=True) if attends_of(layer)]
    blocks = settle(model)
    if not blocks or not attending:
        raise UsageError(
            f"strategy.sequence: {type(model).__name__} has no ordered `blocks`, or none names its attention in "
            "`attends` (docs/add-a-part.md), so sequences cannot be cut. Name it, or set strategy.sequence=1."
        )
    if not loss.from_parts:
        raise UsageError(
            f"strategy.sequence: {loss.name} cannot be computed from stretches of a sequence. Set loss to "
            "{use: cross_entropy}, or strategy.sequence=1."
        )
    for layer in attending:
        for name in attends_of(layer):
            setattr(layer, name, _over_heads(getattr(layer, name), group))
    blocks[0].forward = _dealt(blocks[0].forward, group)
    for block in blocks[1:]:
        block.forward = within_slice(block.forward, "sequence", "tokens", group.rank, group.nranks)
    return model, StretchLoss(loss, group)


def stretch(whole: paddle.Tensor, group: Any) -> paddle.Tensor:
    """This seat's tokens of [n, t, …]: [n, t / seats, …]. Raises UsageError where the stretches would not be equal."""
    if whole.shape[1] % group.nranks:
        raise UsageError(
            f"sequence length {whole.shape[1]} is not divisible by strategy.sequence={group.nranks}. Choose a length "
            "that it divides."
        )
    return paddle.split(whole, group.nranks, axis=1)[group.rank].contiguous()


class StretchLoss(Loss):
    """A loss's totals, counts and scores over whole samples, from this seat's stretch of the outputs.

    Totals are the whole samples' on every seat; the gradient of each is that of its own stretch, and those add up over
    the axis. Collective.
    """

    def __init__(self, loss: Loss, group: Any):
        self.loss, self.group, self.name, self.counted = loss, group, loss.name, loss.counted

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, how many it is over), for outputs [n, t / seats, …] and targets [n, t]."""
        total, count = self.loss(outputs, stretch(targets, self.group))
        if self.counted == "samples":  # each sample's targets were averaged over a stretch
            return self._added(total / self.group.nranks), count
        if self.counted == "targets":
            return self._added(total), self.count(targets)
        return self._added(total), self._added(paddle.to_tensor(number(count), dtype="float64"))

    def count(self, targets: paddle.Tensor) -> Count:
        return self.loss.count(targets)  # of whole ones, which every seat has

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The loss's scores over whole samples."""
        found = self.loss.scores(outputs, stretch(targets, self.group))
        share = self.group.nranks if self.counted == "samples" else 1
        return {name: self._added(value.astype("float64") / share) for name, value in found.items()}

    def _added(self, value: paddle.Tensor) -> paddle.Tensor:
        """The sum over the seats; its gradient is each seat's own."""
        return mp_ops._mp_allreduce(value, group=self.group)


def _dealt(forward: Callable[..., Any], group: Any) -> Callable[..., Any]:
    @functools.wraps(forward)
    def dealt(*inputs: Any) -> paddle.Tensor:
        return stretch(forward(*inputs), group)

    return dealt


def _over_heads(attend: Callable[..., Any], group: Any) -> Callable[..., Any]:
    """Attention over all tokens of this seat's heads, from and to this seat's tokens of all heads.

    Its tensors, and its answer, are [n, t, heads · …] with whole heads beside each other.
    """

    attend = within_slice(attend, "sequence", "heads", group.rank, group.nranks)

    @functools.wraps(attend)
    def attended(*inputs: Any) -> paddle.Tensor:
        traded = [_ToHeads.apply(x, group) if isinstance(x, paddle.Tensor) else x for x in inputs]
        return _ToTokens.apply(attend(*traded), group)

    return attended


def _to_heads(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """[n, t / seats, heads · …] → [n, t, heads / seats · …]."""
    n, t, width = x.shape
    parts = x.reshape([n, t, group.nranks, width // group.nranks]).transpose([2, 0, 1, 3])
    return _traded(parts, group).transpose([1, 0, 2, 3]).reshape([n, -1, width // group.nranks])


def _to_tokens(x: paddle.Tensor, group: Any) -> paddle.Tensor:
    """[n, t, heads / seats · …] → [n, t / seats, heads · …]."""
    n, t, width = x.shape
    parts = x.reshape([n, group.nranks, t // group.nranks, width]).transpose([1, 0, 2, 3])
    return _traded(parts, group).transpose([1, 2, 0, 3]).reshape([n, t // group.nranks, -1])


def _traded(parts: paddle.Tensor, group: Any) -> paddle.Tensor:
    """Part j of dim 0 goes to seat j, and comes from it."""
    given = parts.contiguous()
    taken = paddle.empty_like(given)
    dist.alltoall_single(taken, given, group=group)
    return taken


class _ToHeads(PyLayer):
    """A permutation of what all seats hold: its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _to_tokens(gradient, ctx.group)


class _ToTokens(PyLayer):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, group: Any) -> paddle.Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return _to_heads(gradient, ctx.group)
