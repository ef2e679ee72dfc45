"""How old what the center pulls may be when it is applied: arithmetic, with a center that answers late."""

from types import SimpleNamespace

import pytest

from paddle_dp.strategies.async_average.elastic_worker import ElasticWorker


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
        ElasticWorker._exchange(worker)
    assert begun == sent
    assert taken == applied
    assert worker.waits == waits
    assert all(late - early <= staleness for early, late in zip(begun, taken, strict=False))
