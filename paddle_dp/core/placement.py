"""The placement of one tensor: its slice, the rank that updates it, and the replica that counts.

Several ranks hold slices or copies of one tensor. As in Paddle's placements, a tensor is a `Shard` along one dim, or
replicated. Code that must treat each element of a model exactly once uses a `Placement` instead of the mesh's axes:

| user                                             | uses                                                     |
|--------------------------------------------------|----------------------------------------------------------|
| the gradient norm, a checkpoint, a proof's sheet | `is_main_replica`: the ranks for which it is true have   |
|                                                  | together the whole tensor, each element once             |
| a checkpoint that is saved or loaded             | `global_shape` and `offset` of this rank's slice         |
| the comparison of replicas                       | `slice_index`: equal name and slice mean equal bits      |
| the update (ZeRO)                                | `owner`, `is_updated_at`, `is_stored_at`                 |

While a model is placed, each axis adds records to the learner's `Placements`: tensor.layers the slices, pipeline.stages
the copies of tied weights, sharding.zero the owners. A tensor without a record is whole on every rank that has it. An
axis that places tensors in a new way adds a field here; a strategy whose ranks are on no axis has a subclass, as
parameter_server.served, and gives `Placements` one for tensors without a record.

A gradient is placed like its parameter, and so is an optimizer state, but for counts: `Placements.state_placements`.

Megatron-LM's equivalent is ShardedTensor (global_shape, global_offset, replica_id), PyTorch's is DTensor's placements.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from paddle_dp.mesh.degrees import REPLICA_AXES

Coordinates = Mapping[str, int]  # a rank's coordinate on each axis: `mesh.coords`
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """Slice number `rank` of `size` equal slices along `dim`."""

    dim: int
    rank: int
    size: int

    def cut(self, full: paddle.Tensor) -> paddle.Tensor:
        """A copy of this slice of a whole tensor."""
        length = full.shape[self.dim] // self.size
        start = length * self.rank
        piece = paddle.slice(full, [self.dim], [start], [start + length])
        # Paddle's clone() of a non-contiguous tensor makes two copies (3.3.1).
        return piece.clone() if piece.is_contiguous() else piece.contiguous()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """This rank's slice of one tensor, and which replica counts.

    `shard`: the slice over the tensor axis; None: all of it. `owner`: the rank of the sharding axis that updates it
    (ZeRO); None: every rank that has it does, unless it is frozen. `stored_by_owner`: the other ranks of the sharding
    axis do not store its values between updates (ZeRO-3). `first_copy`: False for copies of a tied weight on later
    stages. `only_at`: for a branch's tensor (strategies.branches), the first rank of the tensor axis that has it.
    """

    shard: Shard | None = None
    owner: int | None = None
    stored_by_owner: bool = False
    first_copy: bool = True
    only_at: int = 0

    def global_shape(self, local: Sequence[int]) -> Shape:
        """The whole tensor's shape, from the shape `local` of this rank's slice."""
        shape = list(local)
        if self.shard is not None:
            shape[self.shard.dim] *= self.shard.size
        return tuple(shape)

    def offset(self, local: Sequence[int]) -> Shape:
        """The offset of this rank's slice, of shape `local`, in the whole tensor."""
        offset = [0] * len(local)
        if self.shard is not None:
            offset[self.shard.dim] = local[self.shard.dim] * self.shard.rank
        return tuple(offset)

    @property
    def slice_index(self) -> int:
        """The number of this rank's slice; -1 for the whole tensor."""
        return -1 if self.shard is None else self.shard.rank

    def is_main_replica(self, at: Coordinates) -> bool:
        """Whether the rank at these coordinates, among those that hold this slice, is the one that counts."""
        return (
            self.first_copy
            and not any(at[axis] for axis in REPLICA_AXES)
            and at["sharding"] == (self.owner or 0)
            and (self.shard is not None or at["tensor"] == self.only_at)
        )

    def is_updated_at(self, at: Coordinates) -> bool:
        """Whether the rank at these coordinates updates the tensor and thus keeps its optimizer states."""
        return self.owner is None or self.owner == at["sharding"]

    def is_stored_at(self, at: Coordinates) -> bool:
        """Whether the rank at these coordinates has the tensor's values between updates."""
        return not self.stored_by_owner or self.is_updated_at(at)


class Placements:
    """The placement of every tensor of a model on this rank, by the tensor object; `default`: if it has no record."""

    def __init__(self, default: Placement = Placement()) -> None:
        self._default = default
        # The tensor is stored with its placement, so that no other object gets its id().
        self._records: dict[int, tuple[paddle.Tensor, Placement]] = {}

    def record(self, tensor: paddle.Tensor, **fields: Any) -> None:
        """Sets some fields of a tensor's `Placement` and keeps the others."""
        self._records[id(tensor)] = tensor, replace(self.placement_of(tensor), **fields)

    def placement_of(self, tensor: paddle.Tensor) -> Placement:
        """The placement of a parameter or buffer; a gradient has its parameter's."""
        record = self._records.get(id(tensor))
        return self._default if record is None else record[1]

    def state_placements(
        self,
        states: Sequence[tuple[str, paddle.Tensor, paddle.Tensor]],
        count_kinds: Callable[[], Collection[str]],
    ) -> list[Placement]:
        """The placement of each of an optimizer's states on this rank: (kind, tensor, parameter).

        A state is sliced as its parameter, also behind further dims (ASGD's gradients of several steps, [steps, …]); of
        another shape (a step count) it is whole on every rank that has it. A kind that has one number for a parameter
        of several is such a count for every parameter: also where a slice is one number. There `count_kinds()` is asked
        for these kinds, because this rank may have states of such slices only.
        """
        counts = {kind for kind, tensor, parameter in states if tensor.size == 1 < parameter.size}
        if any(p.size == 1 and self.placement_of(p).shard is not None for _, _, p in states):
            counts |= set(count_kinds())
        placements = []
        for kind, tensor, parameter in states:
            placement, before = self.placement_of(parameter), tensor.ndim - parameter.ndim
            shard = placement.shard
            if shard is not None:
                is_slice = kind not in counts and tensor.shape[before:] == parameter.shape
                shard = replace(shard, dim=shard.dim + before) if is_slice else None
            placements.append(replace(placement, shard=shard))
        return placements
