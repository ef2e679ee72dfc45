"""Messages between hosts of ranks, without their devices: gathered from all ranks, or pushed from one to another.

A number from a device arrives only after all work queued before it, and the host waits. Hosts exchange their numbers
over sockets instead: they wait for each other, but not for a device.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh import late_ranks, transport

if TYPE_CHECKING:  # and where they are needed: `paddle-dp --help` comes by here, without NumPy
    import paddle

    from paddle_dp.tensors import Array

LENGTH = struct.Struct("<Q")
LOST_LENGTH = 2**64 - 1  # replaces the length of a lost rank
# Negative, as the bridge counts groups from 0.
CHANNELS = {
    "all": -1, "sharding": -2, "gradients": -3, "values": -4, "asked": -5, "lent": -6, "replicas": -7, "claims": -8,
    "granted": -9, "elastic": -10, "center": -11, "servers": -12, "sums": -13, "factors": -14, "pushed": -15,
    "pulled": -16, "samples": -20, "branches": -21, "shared": -22, "rows": -23, "row_gradients": -24,
    "copies": -25,
}  # fmt: skip


class Messages:
    """Messages between the global `ranks`, which include `rank`, over the channel `group`: the mesh, or an axis.

    With `hub`, one of the ranks, each rank sends only to the hub, which sends all messages to each: no two other ranks
    connect. Then `expendable` ranks may die: their messages are omitted from then on, and they are in `lost`, on all
    ranks after the same exchange.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: str,
        hub: int | None = None,
        expendable: Container[int] = (),
        lost: set[int] | None = None,
    ):
        self.id, self.ranks = CHANNELS[group], list(ranks)
        self._group, self._me, self._hub = group, self.ranks.index(rank), hub
        self._expendable, self._lost = expendable, set() if lost is None else lost

    def gather(self, payload: bytes, activity: str) -> list[bytes]:
        """Returns every rank's bytes, in the order of `ranks`, without lost ranks'. Collective. `activity` names this
        exchange in reports. Raises LostPeerError when a rank is gone, or late by `Patience.seconds`."""
        with late_ranks.waiting(self._group, self.ranks, activity):
            endpoint = transport.endpoint()
            if self._hub is None:
                return self._gather(payload, endpoint)
            return self._gather_at(self._hub, payload, endpoint)

    def _gather(self, payload: bytes, endpoint: transport.Endpoint) -> list[bytes]:
        """Gathers in log2(ranks) rounds, in each from a rank twice as far away (Bruck et al. 1997, IEEE Transactions on
        Parallel and Distributed Systems 8)."""
        size = len(self.ranks)
        got = [payload]  # messages of the ranks from this one on, around the ring
        while (have := len(got)) < size:
            count = min(have, size - have)
            endpoint.send(self.id, self.ranks[self._me - have], self.packed(got[:count]))
            message = endpoint.receive(self.id, self.ranks[(self._me + have) % size])
            got += [row for row in _unpack(message) if row is not None]
        return [got[(index - self._me) % size] for index in range(size)]

    def _gather_at(self, hub: int, payload: bytes, endpoint: transport.Endpoint) -> list[bytes]:
        if self.ranks[self._me] != hub:
            endpoint.send(self.id, hub, memoryview(payload))
            rows = list(_unpack(endpoint.receive(self.id, hub)))
            self._lost.update(rank for rank, row in zip(self.ranks, rows, strict=True) if row is None)
        else:
            rows = [payload if rank == hub else self._row(rank, endpoint) for rank in self.ranks]
            packed = Messages.packed(rows)
            for rank in self.ranks:
                if rank != hub and rank not in self._lost:
                    endpoint.send(self.id, rank, packed)
        return [row for row in rows if row is not None]

    def _row(self, rank: int, endpoint: transport.Endpoint) -> bytes | None:
        """Receives a rank's message at the hub; returns None for a lost rank."""
        if rank in self._lost:
            return None
        try:
            return bytes(endpoint.receive(self.id, rank))
        except LostPeerError:
            if rank not in self._expendable or not endpoint.is_gone(rank):
                raise
            self._lost.add(rank)
            return None

    @staticmethod
    def packed(rows: Sequence[bytes | None]) -> memoryview:
        """Packs every rank's bytes into one message of a hub; None stands for a lost rank."""
        chunks = (LENGTH.pack(LOST_LENGTH) if row is None else LENGTH.pack(len(row)) + row for row in rows)
        return memoryview(b"".join(chunks))


def _unpack(packed: bytearray) -> Iterator[bytes | None]:
    at = 0
    while at < len(packed):
        (length,) = LENGTH.unpack_from(packed, at)
        at += LENGTH.size + (length if length != LOST_LENGTH else 0)
        yield bytes(packed[at - length : at]) if length != LOST_LENGTH else None


# Pushed tensors -------------------------------------------------------------------------------------------------------
# Numbered tensors travel from rank to rank: gradients (exchange/pushed_gradients.py), and new parameter values from
# each owner to all other ranks. A send never waits, a receive does.

NUMBER = struct.Struct("<q")
END = -1  # in place of a number: the sender has ended this round


class Push:
    """Numbered tensors on the CPU, exchanged among the global `ranks`; `rank` is this one.

    Tensors from one rank to another on one `channel` (of `CHANNELS`) arrive in order. A push leaves at
    once, also during a backward, and travels while the rank computes. gloo's collectives make all ranks wait for each
    other, also the asynchronous ones (3.3.1).
    """

    def __init__(self, channel: str, ranks: Sequence[int], rank: int):
        self.id, self.ranks, self.rank = CHANNELS[channel], list(ranks), rank
        self.peers = [other for other in self.ranks if other != rank]
        self._channel = channel

    def send_all(self, number: int, tensor: paddle.Tensor) -> None:
        """Sends a copy to all others, now or in a thread: the tensor may be changed immediately."""
        from paddle_dp.tensors import bytes_of

        data = bytes_of(tensor if tensor.is_contiguous() else tensor.contiguous()).copy()
        for to in self.peers:
            self.send_bytes(to, number, data)

    def send_bytes(self, to: int, number: int, data: Array) -> None:
        """Sends bytes, which must not change before the other rank has them."""
        transport.endpoint().send(self.id, to, memoryview(NUMBER.pack(number)), data.data)

    def end(self, to: int) -> None:
        """Marks the end of this round for a rank."""
        transport.endpoint().send(self.id, to, memoryview(NUMBER.pack(END)))

    def receive(self, source: int) -> tuple[int, memoryview] | None:
        """The next tensor from a rank: its number and its bytes, which the caller may keep; None at the end of a round.

        Raises LostPeerError if the rank is gone or sends nothing for `Patience.seconds`.
        """
        data = transport.endpoint().receive(self.id, source)
        (number,) = NUMBER.unpack_from(data)
        return None if number == END else (number, memoryview(data)[NUMBER.size :])

    def arrived(self, source: int) -> bool:
        """Whether `receive` would return at once."""
        return transport.endpoint().arrived(self.id, source)

    @staticmethod
    def into(tensor: paddle.Tensor, data: memoryview) -> None:
        """Writes received bytes into a tensor of the same shape and dtype."""
        from paddle_dp.tensors import bytes_of

        bytes_of(tensor).data[:] = data

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """Wraps receives that all ranks reach together: a rank that waits long in them names the late ranks."""
        with late_ranks.waiting(self._channel, self.ranks, activity):
            yield
