"""Collectives that only some ranks of a group need, or that they need at different moments.

A broadcast or a reduce needs all ranks at the same time and in the same order. But which layers a rank runs, and in
which order its gradients are computed, may depend on its samples, for example where a gate chooses among experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paddle_dp.mesh.messages import Messages
from paddle_dp.parallel.hcg import Group


class Rounds:
    """Lets the ranks of a group agree on the next collectives.

    A rank that needs some of `size` things begins a round and waits there for the others. In a round each rank names
    what it needs, and all ranks call `serve(places)` with everything that any of them needs, in the same order. Ranks
    that run the same layers need the same things in the same round. A rank that needs nothing more stays in `finish`,
    and serves the others, until all are done. The price is a message of a bit for each thing per round, from host to
    host: each waits for the slowest host, and none for its device.
    """

    def __init__(self, group: Group, size: int, serve: Callable[[Sequence[int]], None]):
        self._size, self._serve = size, serve
        self._messages = Messages(group.ranks, group.ranks[group.rank], "sharding")

    def begin(self, needed: Iterable[int]) -> None:
        """One round, for what this rank needs. Collective: matches any round of the other ranks."""
        self._round(needed, done=False)

    def finish(self, needed: Iterable[int] = ()) -> None:
        """Returns when no rank needs anything more. Collective."""
        while not self._round(needed, done=True):
            needed = ()

    def _round(self, needed: Iterable[int], done: bool) -> bool:
        """One round; returns whether all ranks are done."""
        flags = np.zeros(self._size + 1, bool)
        flags[list(needed)] = True
        flags[-1] = not done
        of_ranks = self._messages.gather(np.packbits(flags).tobytes(), "the choice of the next collectives")
        *wanted, unfinished = np.unpackbits(
            np.bitwise_or.reduce([np.frombuffer(one, np.uint8) for one in of_ranks]), count=flags.size
        )
        self._serve(np.flatnonzero(wanted).tolist())
        return not unfinished
