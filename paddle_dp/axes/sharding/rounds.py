"""Rounds in which ranks agree on collectives that only some of them need, or need at different times.

All ranks must enter a broadcast or a reduce at the same time and in the same order. But samples may determine a rank's
layers and the order of its gradients, for example with a gate that chooses among experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import paddle

from paddle_dp.core.data_group import Group
from paddle_dp.mesh.messages import Messages
from paddle_dp.tensors import nbytes

NO_ORDER = bytes(8)


class Rounds:
    """Lets the ranks of a group agree on the next collectives.

    Things to serve are numbered below `size`. A rank that needs some begins a round and waits there for the others. In
    a round each rank names its needs, and all ranks call `serve(numbers)` with the union, in the same order. A rank
    that needs nothing more stays in `finish` and serves the others until all are done. A round costs one message with a
    bit per thing, from host to host: each waits for the slowest host, and none for its device.
    """

    def __init__(self, group: Group, size: int, serve: Callable[[Sequence[int]], None]):
        self._size, self._serve = size, serve
        self._messages = Messages(group.ranks, group.ranks[group.rank], "sharding")

    def begin(self, needed: Iterable[int]) -> None:
        """Runs one round with this rank's needs. Collective: matches any round of the other ranks."""
        self._round(needed, done=False)

    def agree(self, order: bytes, needed: Iterable[int]) -> bool:
        """Runs one round that offers to continue without rounds, in the order with this 8-byte digest.

        Returns whether all ranks offered the same; if not, it is an ordinary round. Collective, as any round.
        """
        return self._round(needed, done=False, order=order) is None

    def finish(self, needed: Iterable[int] = ()) -> None:
        """Serves rounds until no rank needs anything more. Collective."""
        while not self._round(needed, done=True):
            needed = ()

    def _round(self, needed: Iterable[int], done: bool, order: bytes = NO_ORDER) -> bool | None:
        """Runs one round. Returns whether all ranks are done, or None if all offered the same order."""
        flags = np.zeros(self._size + 1, bool)
        flags[list(needed)] = True
        flags[-1] = not done
        choice = order + np.packbits(flags).tobytes()
        choices = self._messages.gather(choice, "the choice of the next collectives")
        if order != NO_ORDER and all(row.startswith(order) for row in choices):
            return None
        *requested, unfinished = np.unpackbits(
            np.bitwise_or.reduce([np.frombuffer(row, np.uint8, offset=len(NO_ORDER)) for row in choices]),
            count=flags.size,
        )
        self._serve(np.flatnonzero(requested).tolist())
        return not unfinished


class OwnerRounds:
    """Rounds for parameters with one owner each: for their values, and for gradients, which are batched.

    In a round all ranks call `reduce(index)` or `broadcast(index)` with a parameter's index.
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
        self._announced: set[int] = set()  # gradients that any rank has had
        self._pending: list[int] = []  # this rank's gradients that are to be sent to their owners
        self._pending_bytes = 0  # of all gradients since the last round, owned ones included
        self._round_bytes = max(self._sizes) // 2

    def gradient(self, index: int) -> None:
        """Queues a gradient unless this rank owns it. A round begins once half the largest parameter's bytes are
        reached, so that rounds are few."""
        if not self._is_local[index]:
            self._pending.append(index)
        self._pending_bytes += self._sizes[index]
        if self._pending_bytes >= self._round_bytes:
            self._rounds.begin(self._take_pending())

    def flush(self) -> None:
        """Begins a round for the pending gradients."""
        self._rounds.begin(self._take_pending())

    def fetch(self, values: Iterable[int]) -> None:
        """Begins a round for values of parameters; it also takes the pending gradients."""
        self._rounds.begin([*self._take_pending(), *self._as_values(values)])

    def agree(self, order: bytes, values: Iterable[int]) -> bool:
        """Does the same as `fetch`, but returns True without serving if all ranks offer the same order: no rounds until
        `finish`."""
        return self._rounds.agree(order, [*self._take_pending(), *self._as_values(values)])

    def computed(self, index: int) -> None:
        """Records that this rank has had a gradient, for any way of sending."""
        self._computed.add(index)

    def finish(self) -> set[int]:
        """Serves rounds until no rank needs another. Returns the gradients `computed` on any rank since the last call.
        Collective."""
        computed = [2 * len(self._sizes) + index for index in self._computed]
        self._computed = set()
        self._rounds.finish([*self._take_pending(), *computed])
        announced, self._announced = self._announced, set()
        return announced

    def _as_values(self, indices: Iterable[int]) -> list[int]:
        return [len(self._sizes) + index for index in indices]

    def _take_pending(self) -> list[int]:
        """Returns the pending gradients and clears the queue."""
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
