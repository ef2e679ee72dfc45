"""Collectives that only some ranks of a group need, or that they need at different moments.

A broadcast or a reduce needs all ranks at the same time and in the same order. But which layers a rank runs, and in
which order its gradients are computed, may depend on its samples, for example where a gate chooses among experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dp.parallel.hcg import Group


class Rounds:
    """Lets the ranks of a group agree on the next collectives.

    A rank that needs some of `size` things begins a round and waits there for the others. In a round each rank names
    what it needs, and all ranks call `serve(places)` with everything that any of them needs, in the same order. Ranks
    that run the same layers need the same things in the same round. A rank that needs nothing more stays in `finish`,
    and serves the others, until all are done. The price is one all-reduce of a few bytes per round, which is read from
    the device.
    """

    def __init__(self, group: Group, size: int, serve: Callable[[Sequence[int]], None]):
        self._group, self._size, self._serve = group, size, serve

    def begin(self, needed: Iterable[int]) -> None:
        """One round, for what this rank needs. Collective: matches any round of the other ranks."""
        self._round(needed, done=False)

    def finish(self, needed: Iterable[int] = ()) -> None:
        """Returns when no rank needs anything more. Collective."""
        while not self._round(needed, done=True):
            needed = ()

    @paddle.no_grad()
    def _round(self, needed: Iterable[int], done: bool) -> bool:
        """One round; returns whether all ranks are done."""
        flags = np.zeros(self._size + 1, "int32")
        flags[list(needed)] = 1
        flags[-1] = done
        sums = paddle.to_tensor(flags)
        dist.all_reduce(sums, group=self._group)
        *counts, finished = sums.tolist()
        self._serve([place for place, ranks in enumerate(counts) if ranks])
        return bool(finished == self._group.nranks)
