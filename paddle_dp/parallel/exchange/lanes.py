"""Process groups side by side, for exchanges that have one owner each, on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_dp.mesh import new_group
from paddle_dp.parallel.hcg import Group

MAX_GROUPS = 4  # groups: each has a stream and buffers of its own


class CommGroups:
    """Groups of the same ranks, at most `MAX_GROUPS`, to which the ranks are dealt as owners.

    What goes to one owner uses one direction of its link, and leaves the other idle: with two ranks, reduces to one
    owner after the other take as long as an all-reduce, which moves twice as much. Groups work at the same time. All
    ranks launch in one order.
    """

    def __init__(self, groups: Sequence[Group]):
        self.groups = groups
        self._group_of = {owner: groups[at % len(groups)] for at, owner in enumerate(groups[0].ranks)}

    @classmethod
    def make(cls, rank_lists: Sequence[Sequence[int]], me: int) -> CommGroups:
        """Those of the one among the lists of ranks in which `me` is. Collective: all ranks make all groups."""
        local: list[Group] = []
        for ranks in rank_lists:
            groups = [new_group(ranks) for _ in range(min(len(ranks), MAX_GROUPS))]
            local = groups if me in ranks else local
        return cls(local)

    def group_of(self, owner: int) -> Group:
        """The group for what a global rank owns."""
        return self._group_of[owner]
