"""Which failure is the cause, when a rank left without a word and its peer is the one that complains."""

from types import SimpleNamespace

import pytest

from paddle_dp.launch.failures import Failure
from paddle_dp.launch.supervisor import Supervision
from paddle_dp.launch.watch import Departure

LOST = "[/gloo/transport/tcp/pair.cc:584] TIMEOUT self_rank = 0 pair_rank = 1"


@pytest.fixture
def supervision(tmp_path):
    plan = SimpleNamespace(job=SimpleNamespace(node_rank=None), ranks=2)
    made = Supervision(plan, SimpleNamespace(pid=2**22), tmp_path, "mark")
    Failure(rank=0, kind="RuntimeError", message=LOST, time=100.0).write(tmp_path)
    return made


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "left with exit status 0"),
        (None, "left with an exit status that nobody saw"),
        (3, "left with exit status 3"),
    ],
)
@pytest.mark.parametrize("when", [99.0, 101.0])
def test_a_rank_that_left_is_the_cause_of_a_lost_peer(supervision, code, said, when):
    supervision.watch.departures = {1: Departure(rank=1, pid=7, time=when, code=code)}
    cause = supervision._cause()
    assert cause.rank == 1
    assert said in cause.message


def test_a_rank_that_ended_much_later_is_not(supervision):
    supervision.watch.departures = {1: Departure(rank=1, pid=7, time=110.0, code=0)}
    assert supervision._cause().rank == 0
