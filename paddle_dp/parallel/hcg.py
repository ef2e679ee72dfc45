"""What is asked of fleet's HybridCommunicateGroup, which all of Paddle calls hcg, and of a process group."""

from __future__ import annotations

from typing import Any, Protocol


class Group(Protocol):
    """A process group, seen from one of its ranks."""

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""
        ...

    @property
    def nranks(self) -> int:
        """How many processes the group has."""
        ...

    @property
    def ranks(self) -> list[int]:
        """Their ranks in the job, in the group's order."""
        ...


class HCG(Protocol):
    """The groups of this rank, one for each axis of a layout: the ranks that differ from it on that axis alone."""

    def get_data_parallel_group(self) -> Group: ...

    def get_model_parallel_group(self) -> Group: ...

    def get_sharding_parallel_group(self) -> Group: ...

    def get_sep_parallel_group(self) -> Group: ...

    def get_pipe_parallel_group(self) -> Group: ...

    def get_sharding_parallel_world_size(self) -> int: ...

    def get_pipe_parallel_world_size(self) -> int: ...

    def get_stage_id(self) -> int: ...

    def topology(self) -> Any:
        """Fleet's CommunicateTopology: coordinates of ranks and lists of groups."""
        ...
