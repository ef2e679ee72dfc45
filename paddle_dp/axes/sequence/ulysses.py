"""The sequence axis (DeepSpeed-Ulysses): each rank holds a shard of every sequence, for long sequences.

Only attention mixes tokens. Before it, an all-to-all exchanges some tokens of all heads for all tokens of some heads;
after it, another one exchanges them back (Jacobs et al., arXiv:2309.14509). So attention sees full sequences, and
rotary positions need no offset. The first block runs on full samples and its outputs are scattered, so learned
positions need no offset either. Paddle 3.3.1 has the groups for this axis, but not this exchange.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.adjoint import WithAdjoint
from paddle_dp.batch import mapped
from paddle_dp.core.blocks import settle
from paddle_dp.core.data_group import Group
from paddle_dp.core.dropout import within_slice
from paddle_dp.core.loss import Count, Loss, number
from paddle_dp.core.wrapping import Method, wrap
from paddle_dp.errors import UsageError
from paddle_dp.part.annotation import attention_methods_of


def parallelize_sequence(model: nn.Layer, loss: Loss, group: Group) -> tuple[nn.Layer, Loss]:
    """Returns the model, changed in place, and the loss on this rank's shard of every sequence.

    Raises UsageError for a model without `attention_methods`, or a loss that cannot be computed from shards.
    """
    attending = [layer for layer in model.sublayers(include_self=True) if attention_methods_of(layer)]
    blocks = settle(model, chain=True)
    if not blocks or not attending:
        raise UsageError(
            f"strategy.sequence: {type(model).__name__} has no ordered `blocks`, or none names its attention in "
            "`attention_methods` (docs/add-a-part.md), so sequences cannot be sharded. Name it, or set "
            "strategy.sequence=1."
        )
    if not loss.splits_outputs:
        raise UsageError(
            f"strategy.sequence: {loss.name} cannot be computed from shards of a sequence. Set loss to "
            "{use: cross_entropy}, or strategy.sequence=1."
        )
    for layer in attending:
        for name in attention_methods_of(layer):
            wrap(layer, name, "sequence", lambda attend: _with_all_to_all(attend, group))
    wrap(blocks[0], "forward", "sequence", lambda forward: _scatter_output(forward, group))
    for block in blocks[1:]:
        wrap(block, "forward", "sequence", lambda forward: _on_tokens(forward, group))
    return model, SequenceShardLoss(loss, group)


def sequence_shard(full: paddle.Tensor, group: Group) -> paddle.Tensor:
    """This rank's tokens of [n, t, …]: [n, t / ranks, …]. Raises UsageError if the ranks do not divide t."""
    if full.shape[1] % group.nranks:
        raise UsageError(
            f"sequence length {full.shape[1]} is not divisible by strategy.sequence={group.nranks}. Choose a length "
            "that it divides."
        )
    return paddle.split(full, group.nranks, axis=1)[group.rank].contiguous()


class SequenceShardLoss(Loss):
    """A loss's totals, counts and scores over full samples on every rank, from its sequence shard of the outputs.

    Backward gives each rank the gradient of its shard. Collective.
    """

    def __init__(self, loss: Loss, group: Group):
        self.loss, self.group, self.name, self.counted = loss, group, loss.name, loss.counted

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, Count]:
        """(total, count) for outputs [n, t / ranks, …] and targets [n, t]."""
        total, count = self.loss(outputs, sequence_shard(targets, self.group))
        if self.counted == "samples":  # the loss averaged each sample's targets over a shard
            return self._added(total / self.group.nranks), count
        if self.counted == "targets":
            return self._added(total), self.count(targets)
        return self._added(total), self._added(paddle.to_tensor(number(count), dtype="float64"))

    def count(self, targets: paddle.Tensor) -> Count:
        return self.loss.count(targets)  # every rank has the full targets

    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The loss's scores over full samples."""
        scores = self.loss.scores(outputs, sequence_shard(targets, self.group))
        share = self.group.nranks if self.counted == "samples" else 1
        return {name: self._added(value.astype("float64") / share) for name, value in scores.items()}

    def full_outputs(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The outputs [n, t, …] of all tokens."""
        outputs, shards = self.loss.full_outputs(outputs), list[paddle.Tensor]()
        dist.all_gather(shards, outputs.contiguous(), group=self.group)
        return paddle.concat(shards, axis=1)

    def _added(self, value: paddle.Tensor) -> paddle.Tensor:
        """The sum over the ranks; its gradient goes to each rank unchanged."""
        return mp_ops._mp_allreduce(value, group=self.group)


def _on_tokens(forward: Method, group: Group) -> Method:
    return within_slice(forward, "sequence", "tokens", group.rank, group.nranks)


def _scatter_output(forward: Method, group: Group) -> Method:
    def shard(x: paddle.Tensor) -> paddle.Tensor:
        return sequence_shard(x, group) if x.is_floating_point() else x  # positions stay whole: of all tokens

    def scattered(*inputs: Any, **named: Any) -> Any:
        return mapped(shard, forward(*inputs, **named))

    return scattered


def _with_all_to_all(attend: Method, group: Group) -> Method:
    """Runs attention over all tokens of this rank's heads; inputs and outputs hold this rank's tokens of all heads,
    ordered by heads: [n, t, heads · …]."""

    attend = within_slice(attend, "sequence", "heads", group.rank, group.nranks)
    to_heads, to_tokens = partial(_to_heads, group=group), partial(_to_tokens, group=group)

    def exchanged(x: Any) -> Any:
        is_activation = isinstance(x, paddle.Tensor) and x.is_floating_point()
        return WithAdjoint.apply(x, to_heads, to_tokens) if is_activation else x

    def attended(*inputs: Any, **named: Any) -> paddle.Tensor:
        output = attend(*map(exchanged, inputs), **{name: exchanged(x) for name, x in named.items()})
        return WithAdjoint.apply(output, to_tokens, to_heads)

    return attended


def _to_heads(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    """[n, t / ranks, heads · …] → [n, t, heads / ranks · …]."""
    n, t, width = x.shape
    chunks = x.reshape([n, t, group.nranks, width // group.nranks]).transpose([2, 0, 1, 3])
    return _all_to_all(chunks, group).transpose([1, 0, 2, 3]).reshape([n, -1, width // group.nranks])


def _to_tokens(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    """[n, t, heads / ranks · …] → [n, t / ranks, heads · …]."""
    n, t, width = x.shape
    chunks = x.reshape([n, group.nranks, t // group.nranks, width]).transpose([1, 0, 2, 3])
    return _all_to_all(chunks, group).transpose([1, 2, 0, 3]).reshape([n, t // group.nranks, -1])


def _all_to_all(chunks: paddle.Tensor, group: Group) -> paddle.Tensor:
    """Sends slice j of dim 0 to rank j, and receives rank j's slice there."""
    sent = chunks.contiguous()
    received = paddle.empty_like(sent)
    dist.alltoall_single(received, sent, group=group)
    return received
