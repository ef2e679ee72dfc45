"""Concurrent process groups on an accelerator, for exchanges with one owner each."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_dp.core.data_group import Group
from paddle_dp.mesh import new_group

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
