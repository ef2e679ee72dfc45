"""Where one tensor lies: its slice of the whole, who updates it, and which rank counts for it.

Several ranks hold parts or copies of one tensor. A `Placement` says which, in the words of Paddle's own placements: a
tensor is a `Shard` along one dim, or replicated. Everything that must treat each number of a model exactly once asks
it, instead of the axes of the mesh:

| who asks                                         | what                                                     |
|--------------------------------------------------|----------------------------------------------------------|
| the gradient norm, a checkpoint, a proof's sheet | `is_main_replica`: the ranks for which it holds have the |
|                                                  | whole tensor between them, each number of it once        |
| a checkpoint that is saved or loaded             | `global_shape` and `offset` of the part that lies here   |
| the comparison of replicas                       | `part`: ranks with one name and one part hold equal bits |
| the update (ZeRO)                                | `owner`, `is_updated_at`, `is_stored_at`                 |

Who cuts, deals or ties a model writes it down while the model is placed, axis by axis, into the `Placements` that the
learner is built with: tensor.layers the slices, pipeline.stages the copies of tied weights, sharding.zero the owners. A
tensor that nobody wrote down is replicated on every rank that has it. An axis that places tensors in another way is one
field more here.

A gradient, or a state of the optimizer, lies as its parameter does; one of another shape (a count of steps) is no
slice, but whole on every rank that has it: `Placements.of(tensor, parameter)`.

Megatron-LM calls the same a ShardedTensor (global_shape, global_offset, replica_id), PyTorch's DTensor placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

Coordinates = Mapping[str, int]  # where a rank is on each axis: `mesh.coords`
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """One of `size` equal slices along `dim`: number `rank`."""

    dim: int
    rank: int
    size: int

    def of(self, whole: paddle.Tensor) -> paddle.Tensor:
        """This slice of a whole tensor, in memory of its own."""
        length = whole.shape[self.dim] // self.size
        start = length * self.rank
        return paddle.slice(whole, [self.dim], [start], [start + length]).clone()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one tensor lies on this rank, and who counts for it.

    `shard`: the slice over the tensor axis; None: all of it. `owner`: the rank of the sharding axis that updates it
    (ZeRO); None: every rank that has it does, or nobody, for it is frozen. `stored_by_owner`: the other ranks of the
    sharding axis have no values between updates (ZeRO-3). `first_copy`: False for the copies of a tied weight on all
    its stages but the first.
    """

    shard: Shard | None = None
    owner: int | None = None
    stored_by_owner: bool = False
    first_copy: bool = True

    def global_shape(self, local: Sequence[int]) -> Shape:
        """The whole tensor's shape, from that of the part that lies here."""
        shape = list(local)
        if self.shard is not None:
            shape[self.shard.dim] *= self.shard.size
        return tuple(shape)

    def offset(self, local: Sequence[int]) -> Shape:
        """Where the part that lies here, of shape `local`, begins in the whole tensor."""
        offset = [0] * len(local)
        if self.shard is not None:
            offset[self.shard.dim] = local[self.shard.dim] * self.shard.rank
        return tuple(offset)

    @property
    def part(self) -> int:
        """The number of the slice that lies here; -1: the whole tensor."""
        return -1 if self.shard is None else self.shard.rank

    def is_main_replica(self, at: Coordinates) -> bool:
        """Whether, of the ranks that hold this part, the one at these coordinates is the one that counts for it."""
        return (
            self.first_copy
            and at["data"] == at["sequence"] == 0
            and at["sharding"] == (self.owner or 0)
            and (self.shard is not None or at["tensor"] == 0)
        )

    def is_updated_at(self, at: Coordinates) -> bool:
        """Whether the rank at these coordinates updates the tensor, so that it keeps the optimizer's states of it."""
        return self.owner is None or self.owner == at["sharding"]

    def is_stored_at(self, at: Coordinates) -> bool:
        """Whether the rank at these coordinates has the tensor's values between updates."""
        return not self.stored_by_owner or self.is_updated_at(at)


class Placements:
    """The placement of every tensor of a model on this rank, by the tensor itself, whatever it is called."""

    def __init__(self) -> None:
        # The tensor is kept beside its placement: the id of one that is gone may be another's.
        self._noted: dict[int, tuple[paddle.Tensor, Placement]] = {}

    def note(self, tensor: paddle.Tensor, **fields: Any) -> None:
        """Writes down some fields of a tensor's `Placement`, beside those that are known."""
        self._noted[id(tensor)] = tensor, replace(self.of(tensor), **fields)

    def of(self, tensor: paddle.Tensor, parameter: paddle.Tensor | None = None) -> Placement:
        """Of a parameter or buffer, or of a gradient or state `tensor` of a parameter."""
        _, placement = self._noted.get(id(tensor if parameter is None else parameter), (None, Placement()))
        if parameter is not None and tensor.shape != parameter.shape:
            return replace(placement, shard=None)
        return placement
