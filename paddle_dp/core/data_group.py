"""Ranks over which layers gather and sum: along some axes, in one separate group or in two of fleet's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle
import paddle.distributed as dist

from paddle_dp.mesh import new_group
from paddle_dp.mesh.degrees import Degrees

# The used parts of fleet's HybridCommunicateGroup (called hcg throughout Paddle) and of a Group -----------------------


class Group(Protocol):
    """A process group, as one of its ranks sees it."""

    @property
    def rank(self) -> int:
        """This process's rank in the group, from 0."""
        ...

    @property
    def nranks(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def ranks(self) -> list[int]:
        """The global ranks, in the group's order."""
        ...


class HCG(Protocol):
    """This rank's groups, one per axis: the ranks that differ from it on that axis only."""

    def get_data_parallel_group(self) -> Group: ...

    def get_model_parallel_group(self) -> Group: ...

    def get_sharding_parallel_group(self) -> Group: ...

    def get_sep_parallel_group(self) -> Group: ...

    def get_pipe_parallel_group(self) -> Group: ...

    def get_sep_parallel_world_size(self) -> int: ...

    def get_sharding_parallel_world_size(self) -> int: ...

    def get_pipe_parallel_world_size(self) -> int: ...

    def get_stage_id(self) -> int: ...

    def topology(self) -> Any:
        """Fleet's CommunicateTopology: the coordinates of ranks, and the groups of each axis."""
        ...


class ProcessGroup(Protocol):
    """The ranks over which a layer gathers and sums: all of a mesh, or some."""

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]: ...

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor: ...


class PaddleGroup:
    """Ranks with a separate process group, as seen by `rank`; a single rank has no group."""

    def __init__(self, ranks: Sequence[int], rank: int, group: Any):
        self.ranks, self.rank, self.group = list(ranks), rank, group

    @classmethod
    def create(cls, degrees: Degrees, rank: int, *axes: str) -> PaddleGroup:
        """The ranks that differ from `rank` on these axes only. Collective: all ranks create all groups."""
        local = None
        for ranks in degrees.groups(*axes):
            group = new_group(ranks) if len(ranks) > 1 else None
            local = cls(ranks, rank, group) if rank in ranks else local
        assert local is not None
        return local

    @property
    def group_rank(self) -> int:
        """This rank's index in `ranks`."""
        return self.ranks.index(self.rank)

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every rank's `tensor`, in the order of `ranks`. Collective."""
        if self.group is None:
            return [tensor]
        gathered: list[paddle.Tensor] = []
        dist.all_gather(gathered, tensor, group=self.group)
        return gathered

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the ranks, in place, and returns it. Collective."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class NestedGroup:
    """The ranks along data and sharding as one group: fleet has a group for each of the two axes."""

    def __init__(self, groups: Sequence[Any]):
        self.groups = [group for group in groups if group.nranks > 1]

    @classmethod
    def from_hcg(cls, hcg: HCG) -> NestedGroup:
        """This rank's group in fleet's HybridCommunicateGroup."""
        return cls([hcg.get_data_parallel_group(), hcg.get_sharding_parallel_group()])

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every reader's `tensor` (equal shapes and dtypes), in the same order on all of them. Collective."""
        gathered = tensor.unsqueeze(0)
        for group in self.groups:
            rows: list[paddle.Tensor] = []
            dist.all_gather(rows, gathered, group=group)
            gathered = paddle.concat(rows)
        return list(gathered)

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the readers, in place, and returns it. Collective."""
        for group in self.groups:
            dist.all_reduce(tensor, group=group)
        return tensor


MAX_GROUPS = 4  # each group has a separate stream and buffers


class CommGroups:
    """At most `MAX_GROUPS` groups of the same ranks; owners are distributed among them.

    A reduce to one owner uses one direction of its link only: with two ranks, sequential reduces to both owners take as
    long as an all-reduce, which moves twice as many bytes. Separate groups work concurrently. All ranks launch in the
    same order.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self._group_of = {owner: groups[at % len(groups)] for at, owner in enumerate(groups[0].ranks)}

    @classmethod
    def make(cls, rank_lists: Sequence[Sequence[int]], me: int) -> CommGroups:
        """Creates all groups and returns those that contain `me`. Collective: all ranks create all groups."""
        local: list[Group] = []
        for ranks in rank_lists:
            groups = [new_group(ranks) for _ in range(min(len(ranks), MAX_GROUPS))]
            local = groups if me in ranks else local
        return cls(local)

    def group_of(self, owner: int) -> Group:
        """The group for parameters of this owner, a global rank."""
        return self._group_of[owner]
