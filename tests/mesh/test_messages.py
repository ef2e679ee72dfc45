"""What every rank says reaches every rank, in the order of the ranks, whatever their number."""

from __future__ import annotations

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
