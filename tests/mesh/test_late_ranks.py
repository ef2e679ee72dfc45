"""Which ranks are late to an exchange follows from how many exchanges each has entered."""

import time

import pytest

from paddle_dp.errors import JobError
from paddle_dp.mesh.late_ranks import Arrivals
from tests.mesh.test_transport import Store


def arrivals(**settings):
    """The counts of rank 0 of 4, compared often."""
    made = Arrivals(0, Store, **settings)
    made.notice, made.idle, made.poll = 0.05, 0.01, 0.01
    return made


def test_ranks_that_entered_fewer_exchanges_of_the_group_are_late():
    mine = arrivals()
    with mine.waiting("all", range(4), "a sum"):
        pass
    with mine.waiting("all", range(4), "a sum"):
        (wait,) = mine._waits
        counts = {1: {"all": 2}, 2: {"all": 1, "group 3": 9}, 3: {}}
        assert mine.late(wait, counts) == (2, 3)


def test_the_late_rank_is_named_while_others_wait_and_when_patience_ends(capfd):
    mine, store = arrivals(patience=0.3), Store()
    store.set("paddle_dp/arrivals/1", '{"all": 1}')
    store.set("paddle_dp/arrivals/2", "{}")
    mine._open = lambda: store
    mine.start(store)

    def exchange():
        with mine.waiting("all", range(3), "a sum"):
            time.sleep(0.4)
            raise RuntimeError("gloo: TIMEOUT")

    with pytest.raises(JobError, match="rank 0 has waited 0 s for rank 2 in a sum"):
        exchange()
    mine._stop.set()
    assert "rank 0 has waited 0 s in a sum for rank 2" in capfd.readouterr().err


def test_another_error_stays_what_it_is():
    def exchange():
        with arrivals().waiting("all", range(3), "a sum"):
            raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        exchange()
