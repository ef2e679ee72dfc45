from types import SimpleNamespace

import numpy as np
import pytest

from paddle_dp.strategies.async_average import elastic_rank as elastic_average
from paddle_dp.strategies.async_average.elastic_rank import ROUND, ElasticAverage, ElasticRank


class Network:
    """Endpoints of ranks in one process: messages wait until `deliver`."""

    def __init__(self) -> None:
        self.rank = 0  # whose endpoint is asked for
        self.answers: dict[tuple[int, int], object] = {}
        self.wire: list[tuple[int, int, int, bytes]] = []  # group, from, to, data
        self.inbox: dict[tuple[int, int, int], list[bytearray]] = {}

    def send(self, group, to, *data):
        self.wire.append((group, self.rank, to, b"".join(bytes(part) for part in data)))

    def answer(self, group, answer):
        self.answers[group, self.rank] = answer

    def arrived(self, group, source):
        return bool(self.inbox.get((group, self.rank, source)))

    def receive(self, group, source):
        return self.inbox[group, self.rank, source].pop(0)

    def deliver(self):
        while self.wire:
            group, source, to, data = self.wire.pop(0)
            me, self.rank = self.rank, to
            if answer := self.answers.get((group, to)):
                answer(source, bytearray(data))
            else:
                self.inbox.setdefault((group, to, source), []).append(bytearray(data))
            self.rank = me


@pytest.fixture
def network(monkeypatch):
    found = Network()
    monkeypatch.setattr(elastic_average.transport, "endpoint", lambda: found)
    return found


def members(network, ranks, size, rate):
    found = []
    for rank in range(ranks):
        network.rank = rank
        found.append(ElasticAverage(range(ranks), rank, size, rate))
    return found


def test_it_is_easgd_s_formula(network):
    """x ← x - α (x - x̃), x̃ ← x̃ + α (x - x̃), one exchange after the other, in pieces on three ranks."""
    start, alpha = np.arange(7, dtype=np.float32), np.float32(0.25)
    ranks = members(network, 3, 7, alpha)
    for one in ranks:
        one.begin(start)
    center = start.copy()
    rng = np.random.default_rng(0)
    for rank in (0, 2, 2, 1):
        weights = start + rng.normal(size=7).astype(np.float32)
        network.rank = rank
        ranks[rank].send(weights)
        assert ranks[rank].is_under_way and not ranks[rank].has_arrived()
        network.deliver()
        assert ranks[rank].has_arrived()
        pulled = alpha * (weights - center)
        np.testing.assert_allclose(ranks[rank].take(), pulled, rtol=1e-6, atol=1e-7)
        assert not ranks[rank].is_under_way
        center += pulled
    kept = np.concatenate([one._center for one in ranks])
    np.testing.assert_allclose(kept, center, rtol=1e-6)


def test_a_question_from_the_next_round_waits_for_it(network):
    first, second = members(network, 2, 4, 0.5)
    for one in (first, second):
        one.begin(np.zeros(4, np.float32))
    network.rank = 1
    second.begin(np.full(4, 8, np.float32))  # the first is still in the meeting
    second.send(np.full(4, 10, np.float32))
    network.deliver()
    network.rank = 1
    assert not second.has_arrived()
    network.rank = 0
    first.begin(np.full(4, 8, np.float32))
    network.deliver()
    network.rank = 1
    assert second.take().tolist() == [1, 1, 1, 1]
    assert ROUND.size == 8


class Late:
    """A center whose answers are there `after` so many looks."""

    def __init__(self, after: int):
        self.after, self.looks, self.is_under_way = after, 0, False

    def send(self, weights):
        self.is_under_way, self.looks = True, 0

    def has_arrived(self):
        self.looks += 1
        return self.looks >= self.after

    def take(self):
        self.is_under_way = False
        return self.looks


@pytest.mark.parametrize(
    ("after", "staleness", "every", "sent", "applied", "waits"),
    [
        (1, 4, 4, [4, 8, 12], [5, 9], 0),  # at the next update
        (2, 4, 1, [1, 3, 5, 7, 9, 11], [3, 5, 7, 9, 11], 0),  # the next exchange begins when one is done
        (9, 3, 4, [4, 8, 12], [7, 11], 2),  # three updates later, whatever it takes
        (9, 1, 1, list(range(1, 13)), list(range(2, 13)), 11),  # as if it waited for each
    ],
)
def test_an_answer_is_applied_when_it_is_there_or_waited_for(after, staleness, every, sent, applied, waits):
    begun, taken, center = [], [], Late(after)
    weights = SimpleNamespace(periods=SimpleNamespace(every=every))
    worker = SimpleNamespace(
        local_updates=0, _since=0, _age=0, waits=0, _staleness=staleness, _weights=weights,
        _elastic=center, _flat=lambda: begun.append(worker.local_updates),
        _apply=lambda _: taken.append(worker.local_updates),
    )  # fmt: skip
    for _ in range(12):
        ElasticRank._exchange(worker)
    assert begun == sent
    assert taken == applied
    assert worker.waits == waits
    assert all(late - early <= staleness for early, late in zip(begun, taken, strict=False))
