"""Megatron's sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4), for plain models.

Between sharded matrices each rank holds a shard of the tokens, not a replica: norms, dropout and residuals need
1/tp_size of the memory and of the time. The all-gather before a colwise layer and the reduce-scatter after a rowwise
one move as many bytes as tensor parallelism alone.

Fleet's layers shard the first dim, [t, n, width]; plain models have [n, t, width], so each layer's inputs and outputs
are transposed.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    AllGatherOp,
    ColumnSequenceParallelLinear,
    GatherOp,
    ReduceScatterOp,
    RowSequenceParallelLinear,
    ScatterOp,
    mark_as_sequence_parallel_parameter,
)

from paddle_dp.adjoint import WithAdjoint
from paddle_dp.axes.tensor.layers import CopyToTensorParallel, TensorParallelizer, layers_in
from paddle_dp.axes.tensor.rng import draw_slice
from paddle_dp.batch import mapped
from paddle_dp.core.blocks import blocks_of, settle
from paddle_dp.core.data_group import Group
from paddle_dp.core.precision import shared
from paddle_dp.errors import UsageError


def _transposed(x: paddle.Tensor) -> paddle.Tensor:
    """[n, t, …] ↔ [t, n, …], contiguous in both directions, as collectives require."""
    return WithAdjoint.apply(x, _swapped, _swapped)


def _swapped(x: paddle.Tensor) -> paddle.Tensor:
    return x.transpose([1, 0, *range(2, x.ndim)]).contiguous()


class SequenceColwiseLinear(ColumnSequenceParallelLinear):
    """Sequence shards [n, t / tp_size, width] → some of the outputs for all tokens [n, t, outputs / tp_size]."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(gathered(x, self.model_parallel_group), self.weight, self.bias)


def gathered(x: paddle.Tensor, group: Group) -> paddle.Tensor:
    """Gathers sequence shards [n, t / tp_size, …] to all tokens [n, t, …]; gradients are reduce-scattered. Layers with
    the same input share one exchange."""

    def exchange(shard: paddle.Tensor) -> paddle.Tensor:
        return _transposed(AllGatherOp.apply(_transposed(shard)))

    return shared(x, exchange, ("gathered", *group.ranks))


class RowwiseLinear(RowSequenceParallelLinear):
    """Some of the inputs for all tokens [n, t, inputs / tp_size] → sequence shards [n, t / tp_size, width]."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return _transposed(super().forward(_transposed(x)))


class GatherFromSequenceParallel(CopyToTensorParallel):
    """A layer with sharded outputs that takes sequence shards; the input's gradients are reduce-scattered."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self._layer[0](gathered(x, self.group))


class BlockParallelizer(TensorParallelizer):
    """Shards the layers of blocks that work on sequence shards."""

    kinds = (SequenceColwiseLinear, RowwiseLinear, GatherFromSequenceParallel)

    def _check_tokens_unsplit(self, full: nn.Layer) -> None:
        raise UsageError(
            f"strategy.sequence_parallel: a {type(full).__name__} works on pixels, and between this model's blocks a "
            "rank would hold its tokens only. Set strategy.sequence_parallel=false, or leave the layer whole."
        )

    def _copied(self, narrow: paddle.Tensor) -> paddle.Tensor:
        """Gathers x A of this rank's tokens to x A of all tokens."""
        return _transposed(AllGatherOp.apply(_transposed(narrow)))

    def _summed(self, narrow: paddle.Tensor) -> paddle.Tensor:
        """Sums the ranks' partial x A of all tokens, and keeps this rank's tokens."""
        return _transposed(ReduceScatterOp.apply(_transposed(narrow)))


class SequenceParallelizer(TensorParallelizer):
    """Shards a model; activations are sequence shards from the first block's outputs on.

    A block with a `cuts` table works on sequence shards; one without a table, and always the first block, works on full
    sequences. Between the two kinds, activations are scattered or gathered. Raises UsageError for a model without
    ordered blocks.
    """

    def parallelize(self, model: nn.Layer) -> nn.Layer:
        blocks = blocks_of(model)
        if len(blocks) < 2:
            raise UsageError(
                f"strategy.sequence_parallel: {type(model).__name__} has no ordered `blocks`, between which sequences "
                "could be scattered. Keep its layers in one (docs/add-a-part.md), or set sequence_parallel=false."
            )
        inner = BlockParallelizer(self.group, self.placements, self.initial)
        inner._sharded = self._sharded
        block_layers = [layers_in(block) for block in blocks]
        first = self.replace(model, block_layers[0])
        on_shards = [False, *(inner.replace(model, layers) for layers in block_layers[1:])]
        if not (first or any(on_shards)):
            return super().parallelize(model)  # raises the error for a missing table
        self._check_shared(model)
        self.cuts_classes = self.cuts_classes or inner.cuts_classes
        blocks = settle(model, chain=True)
        for number, block in enumerate(blocks):
            if on_shards[number]:
                self._mark(block)
            if on_shards[number] and not on_shards[number - 1]:
                blocks[number - 1].register_forward_post_hook(self._scatter)
            if number and on_shards[number - 1] and not on_shards[number]:
                block.register_forward_pre_hook(self._gather)
        return model

    def _scatter(self, block: nn.Layer, inputs: Any, outputs: Any) -> Any:
        return mapped(self._scattered, outputs)

    def _scattered(self, output: paddle.Tensor) -> paddle.Tensor:
        if not output.is_floating_point():  # positions, which attention reads of all tokens
            return output
        length = output.shape[1]
        if length % self.group.nranks:
            raise UsageError(
                f"strategy.sequence_parallel: sequence length {length} is not divisible by strategy.tensor="
                f"{self.group.nranks}. Choose a length that it divides, or set strategy.sequence_parallel=false."
            )
        return _transposed(ScatterOp.apply(_transposed(output)))

    @staticmethod
    def _gather(block: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        def gathered(x: paddle.Tensor) -> paddle.Tensor:
            return _transposed(GatherOp.apply(_transposed(x))) if x.is_floating_point() else x

        return (mapped(gathered, inputs[0]), *inputs[1:])

    def _mark(self, block: nn.Layer) -> None:
        """Prepares a block for sequence shards: it draws its tokens' masks, and its unsharded parameters are marked.

        Their gradients cover this rank's tokens only; `axes.axes_exchange` sums the marked ones over the axis, once per
        batch. (Fleet's hooks need the number of backward passes in advance.)
        """
        draw_slice(block, "tokens", self.group, "forward")
        for parameter in block.parameters():
            if self.placements.placement_of(parameter).shard is None:
                mark_as_sequence_parallel_parameter(parameter)
