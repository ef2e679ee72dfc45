"""What the processes of some ranks tell each other, past their devices.

A number that comes back from a device is there when the device has done all that it was given before, and the host
waits. What the hosts know already they tell each other over sockets: they wait for each other, and for no device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from paddle_dp.mesh import late_ranks, transport

LENGTH = struct.Struct("<Q")
# Below 0: the bridge counts from 0.
CHANNELS = {
    "all": -1, "sharding": -2, "gradients": -3, "values": -4, "asked": -5, "lent": -6, "replicas": -7, "claims": -8,
    "granted": -9, "elastic": -10, "center": -11, "servers": -12, "sums": -13, "factors": -14,
    "samples": -20,
}  # fmt: skip


class Messages:
    """Messages among the global `ranks`, one of which is `rank`: of the whole mesh, or of an axis (`group`).

    With `hub`, one of the ranks, each sends to that one alone, which sends all to each: no two others ever connect.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group: str, hub: int | None = None):
        self.id, self.ranks = CHANNELS[group], list(ranks)
        self._group, self._me, self._hub = group, self.ranks.index(rank), hub

    def gather(self, mine: bytes, what: str) -> list[bytes]:
        """Every rank's bytes, in the order of `ranks`. Collective. `what`: this exchange, when ranks are late to it.

        Raises LostPeerError when a rank is gone, or is late by the whole of `Patience.seconds`.
        """
        arrivals = late_ranks.arrivals()
        late = nullcontext() if arrivals is None else arrivals.waiting(self._group, self.ranks, what)
        with transport.around(self), late:
            endpoint = transport.endpoint()
            return (
                self._gather(mine, endpoint)
                if self._hub is None
                else self._gather_at(self._hub, mine, endpoint)
            )

    def _gather(self, mine: bytes, endpoint: transport.Endpoint) -> list[bytes]:
        """In each of log2(ranks) turns a rank gets as many as it has, from twice as far away (Bruck et al. 1997, IEEE
        Transactions on Parallel and Distributed Systems 8)."""
        size = len(self.ranks)
        got = [mine]  # of the ranks from this one on, around the circle
        while (have := len(got)) < size:
            wanted = min(have, size - have)
            endpoint.send(self.id, self.ranks[self._me - have], self.packed(got[:wanted]))
            got += _parts(endpoint.receive(self.id, self.ranks[(self._me + have) % size]))
        return [got[(place - self._me) % size] for place in range(size)]

    def _gather_at(self, hub: int, mine: bytes, endpoint: transport.Endpoint) -> list[bytes]:
        if self.ranks[self._me] != hub:
            endpoint.send(self.id, hub, memoryview(mine))
            return list(_parts(endpoint.receive(self.id, hub)))
        rows = [mine if rank == hub else bytes(endpoint.receive(self.id, rank)) for rank in self.ranks]
        packed = Messages.packed(rows)
        for rank in self.ranks:
            if rank != hub:
                endpoint.send(self.id, rank, packed)
        return rows

    @staticmethod
    def packed(rows: Sequence[bytes]) -> memoryview:
        """Every rank's bytes as one message, which a hub sends."""
        return memoryview(b"".join(LENGTH.pack(len(row)) + row for row in rows))


def _parts(packed: bytearray) -> Iterator[bytes]:
    at = 0
    while at < len(packed):
        (length,) = LENGTH.unpack_from(packed, at)
        at += LENGTH.size + length
        yield bytes(packed[at - length : at])
