"""Collectives that only some ranks of a group need, or that they need at different moments.

A broadcast or a reduce needs all ranks at the same time and in the same order. But which layers a rank runs, and in
which order its gradients are computed, may depend on its samples, for example where a gate chooses among experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import paddle

from paddle_dp.mesh.messages import Messages
from paddle_dp.parallel.exchange.memory import nbytes
from paddle_dp.parallel.hcg import Group

NO_ORDER = bytes(8)


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

    def agree(self, order: bytes, needed: Iterable[int]) -> bool:
        """One round that offers to go on without rounds, in an order with this digest of 8 bytes: whether all ranks
        have offered the same. If not, it is a round like any other. Collective, as any round."""
        return self._round(needed, done=False, order=order) is None

    def finish(self, needed: Iterable[int] = ()) -> None:
        """Returns when no rank needs anything more. Collective."""
        while not self._round(needed, done=True):
            needed = ()

    def _round(self, needed: Iterable[int], done: bool, order: bytes = NO_ORDER) -> bool | None:
        """One round; returns whether all ranks are done, or None where all have offered the same order."""
        flags = np.zeros(self._size + 1, bool)
        flags[list(needed)] = True
        flags[-1] = not done
        is_local = order + np.packbits(flags).tobytes()
        choices = self._messages.gather(is_local, "the choice of the next collectives")
        if order != NO_ORDER and all(one.startswith(order) for one in choices):
            return None
        *requested, unfinished = np.unpackbits(
            np.bitwise_or.reduce([np.frombuffer(one, np.uint8, offset=len(NO_ORDER)) for one in choices]),
            count=flags.size,
        )
        self._serve(np.flatnonzero(requested).tolist())
        return not unfinished


class OwnerRounds:
    """Rounds for parameters with one owner each: for their gradients, which wait until they are some, and their values.

    Things are called by their parameter's place. In a round all ranks call `reduce(place)` or `lend(place)`.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        is_local: Sequence[bool],
        reduce: Callable[[int], None],
        broadcast: Callable[[int], None],
    ):
        self._is_local, self._reduce, self._broadcast = is_local, reduce, broadcast
        self._sizes = [nbytes(parameter) for parameter in parameters]
        self._rounds = Rounds(group, 3 * len(parameters), self._serve)
        self._computed: set[int] = set()  # gradients that this rank has had since the last `finish`
        self._announced: set[int] = set()  # those of all ranks
        self._pending: list[int] = []  # this rank's gradients that are to be sent to their owners
        self._pending_bytes = 0  # of all gradients since the last round, also of those that this rank owns
        self._round_bytes = max(self._sizes) // 2

    def gradient(self, index: int) -> None:
        """Queues a gradient unless this rank owns it. A round begins once the gradients of half the largest parameter's
        size are there, so that rounds are few."""
        if not self._is_local[index]:
            self._pending.append(index)
        self._pending_bytes += self._sizes[index]
        if self._pending_bytes >= self._round_bytes:
            self._rounds.begin(self._take_pending())

    def flush(self) -> None:
        """Begins a round for the pending gradients."""
        self._rounds.begin(self._take_pending())

    def fetch(self, values: Iterable[int]) -> None:
        """Begins a round for the values of parameters; it takes the pending gradients, too."""
        self._rounds.begin([*self._take_pending(), *self._as_values(values)])

    def agree(self, order: bytes, values: Iterable[int]) -> bool:
        """The same, or no more rounds until `finish` where all ranks offer the same order."""
        return self._rounds.agree(order, [*self._take_pending(), *self._as_values(values)])

    def computed(self, index: int) -> None:
        """Notes that this rank has had a gradient, however it is sent."""
        self._computed.add(index)

    def finish(self) -> set[int]:
        """Takes part in rounds until no rank needs another one. Returns which gradients were `computed` on any rank
        since the last time. Collective."""
        computed = [2 * len(self._sizes) + index for index in self._computed]
        self._computed = set()
        self._rounds.finish([*self._take_pending(), *computed])
        announced, self._announced = self._announced, set()
        return announced

    def _as_values(self, indices: Iterable[int]) -> list[int]:
        return [len(self._sizes) + index for index in indices]

    def _take_pending(self) -> list[int]:
        """The pending gradients, which are pending no more."""
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        return pending

    def _serve(self, indices: Sequence[int]) -> None:
        for index in indices:
            kind, index = divmod(index, len(self._sizes))
            if kind == 0:
                self._reduce(index)
            elif kind == 2:
                self._announced.add(index)
            else:
                self._broadcast(index)
