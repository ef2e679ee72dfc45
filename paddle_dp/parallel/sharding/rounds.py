"""Collectives that the ranks of a group need at different moments, or only some of them need.

A broadcast or a reduce wants all ranks at once, and in one order. Which layers a rank computes may depend on its
samples, though, where a gate chooses among experts; and so does the order in which its gradients are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dp.parallel.hcg import Group


class Rounds:
    """Ranks agree on what comes next: who needs something begins a round, and waits there for the others.

    In a round each rank says which of `size` things it needs, all together serve whatever any of them does, in one
    order, by `serve(places)`; and each goes on. Where all compute the same layers, all need the same at the same time.
    A rank that needs nothing more goes on serving in `finish` until nobody does. The price is one all-reduce of a few
    bytes a round, which is read from the device.
    """

    def __init__(self, group: Group, size: int, serve: Callable[[Sequence[int]], None]):
        self._group, self._size, self._serve = group, size, serve

    def begin(self, wanted: Iterable[int]) -> None:
        """One round, for what this rank wants. Collective, with any other round."""
        self._round(wanted, done=False)

    def finish(self, wanted: Iterable[int] = ()) -> None:
        """Returns when no rank wants anything more. Collective."""
        while not self._round(wanted, done=True):
            wanted = ()

    @paddle.no_grad()
    def _round(self, wanted: Iterable[int], done: bool) -> bool:
        """Whether this was the last round of all ranks."""
        flags = np.zeros(self._size + 1, "int32")
        flags[list(wanted)] = 1
        flags[-1] = done
        told = paddle.to_tensor(flags)
        dist.all_reduce(told, group=self._group)
        *by, finished = told.tolist()
        self._serve([place for place, ranks in enumerate(by) if ranks])
        return bool(finished == self._group.nranks)
