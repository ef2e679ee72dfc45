"""What every rank says reaches every rank, in the order of the ranks, whatever their number."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh.messages import Messages
from paddle_dp.mesh.transport import Endpoint, Patience
from tests.mesh.test_transport import Store


@pytest.mark.parametrize("size", range(1, 8))
def test_all_hear_all(size: int) -> None:
    store, ranks = Store(), list(range(10, 10 + size))
    endpoints = {rank: Endpoint(store, rank) for rank in ranks}

    def talk(rank: int) -> list[list[bytes]]:
        messages = Messages(ranks, rank, "all")
        return [messages._gather(b"%d" % rank * turn, endpoints[rank]) for turn in range(3)]

    with ThreadPoolExecutor(size) as threads:
        heard = list(threads.map(talk, ranks))
    assert heard == [[[b"%d" % rank * turn for rank in ranks] for turn in range(3)]] * size


def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "seconds", 0.1)
    store = Store()
    first, _ = Endpoint(store, 0), Endpoint(store, 1)
    with pytest.raises(
        LostPeerError, match=r"rank 0 waits for a message of rank 1, which sent nothing for 0.1 s"
    ):
        Messages([0, 1], 0, "all")._gather(b"", first)


def test_at_a_hub_nobody_else_is_connected_and_the_lost_are_left_out() -> None:
    """Three ranks talk through rank 0; then rank 2 is gone, which both others know after the next exchange."""
    store, ranks = Store(), [0, 1, 2]
    endpoints = {rank: Endpoint(store, rank) for rank in ranks}
    lost: dict[int, set[int]] = {rank: set() for rank in ranks}
    messages = {rank: Messages(ranks, rank, "all", 0, frozenset({1, 2}), lost[rank]) for rank in ranks}

    def talk(rank: int) -> list[bytes]:
        return messages[rank]._gather_at(0, b"%d" % rank, endpoints[rank])

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(talk, ranks)) == [[b"0", b"1", b"2"]] * 3
        assert list(endpoints[1]._outgoing) == list(endpoints[2]._outgoing) == [0]
        endpoints[2]._outgoing[0]._connection.shutdown(socket.SHUT_RDWR)
        for _ in range(2):
            assert list(threads.map(talk, [0, 1])) == [[b"0", b"1"]] * 2
            assert lost[0] == lost[1] == {2}


def test_a_rank_that_is_needed_is_not_left_out() -> None:
    store = Store()
    hub, other = Endpoint(store, 0), Endpoint(store, 1)
    other.connect(0)
    other._outgoing[0]._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LostPeerError, match="of rank 1, which has left the job"):
        Messages([0, 1], 0, "all", 0)._gather_at(0, b"", hub)
