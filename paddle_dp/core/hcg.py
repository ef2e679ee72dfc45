"""The used parts of fleet's HybridCommunicateGroup (called hcg throughout Paddle) and of a Group."""

from __future__ import annotations

from typing import Any, Protocol


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
