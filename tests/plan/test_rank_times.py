"""The parts of a step follow from tapes, and expected gains from the parts: by hand-made tapes, in whole seconds."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_dp.plan.changes import Facts, changes, workers_that_would_do
from paddle_dp.plan.measured import Measured
from paddle_dp.plan.rank_times import WORK_COMPONENTS, RankTimes, attribute, slowest


def row(own: dict[str, float], waits: Any = (), host: str = "a", **more: Any) -> dict[str, Any]:
    """One rank's tape of two steps."""
    tape = {
        "own": [[phase, "", seconds] for phase, seconds in own.items()], "cpu": {}, "waits": list(waits),
        "sends": more.pop("sends", []), "transfers": more.pop("transfers", []),
    }  # fmt: skip
    rest = {
        "zero": 0.0, "seconds": 20.0, "steps": 2, "alone": 0.0, "bare": None, "busy": 0.0,
        "workers_busy": 0.0,
    }  # fmt: skip
    return {"host": host, "tape": tape, **rest, **more}


def test_until_the_last_has_come_one_waits_for_it_and_then_for_the_wire():
    early, late = attribute(
        [
            row({"forward": 4.0, "exchange": 1.0}, [("group 0", 7, "exchange", 10.0, 18.0, False)]),
            row({"forward": 10.0}, [("group 0", 7, "exchange", 15.0, 18.0, False)]),
        ]
    )
    # The exchange: 1.5 of the wire and 0.5 of its own.
    assert (early.forward, early.waiting, early.exchange) == (2.0, 2.5, 2.0)
    assert early.waits_for == {1: 2.5} and early.exchanges == 0.5
    assert (late.forward, late.waiting, late.exchange, late.waits_for) == (5.0, 0.0, 1.5, {})
    found = slowest([early, late])
    assert found is not None and (found[0].rank, found[1], found[2]) == (1, 2.5, "forward")


def test_clocks_of_two_machines_are_compared_by_when_the_steps_began():
    early, late = attribute(
        [
            row({}, [("group 0", 1, "exchange", 10.0, 18.0, False)], zero=8.0),
            row({}, [("group 0", 1, "exchange", 115.0, 118.0, False)], host="b", zero=108.0),
        ]
    )
    assert (early.waiting, early.exchange, late.exchange) == (2.5, 1.5, 1.5)


def test_a_message_is_waited_for_until_it_is_sent_and_then_it_is_on_its_way():
    first, second = attribute(
        [
            row({}, sends=[(5, 1, 3, 12.0)]),
            row({}, [("message 5 0", 3, "forward", 10.0, 13.0, False)]),
        ]
    )
    assert (second.waiting, second.exchange, second.waits_for) == (1.0, 0.5, {0: 1.0})
    assert first.waiting == first.exchange == 0.0


def test_who_waits_itself_is_not_to_blame():
    """The second waits for the first's message, which waits for the wire for 3 s and for the third for 1."""
    first, second, third = attribute(
        [
            row({}, [("message 5 2", 1, "exchange", 10.0, 14.0, False)], sends=[(5, 1, 1, 15.0)], steps=1),
            row({}, [("message 5 0", 1, "exchange", 9.0, 16.0, False)], steps=1),
            row({}, sends=[(5, 0, 1, 11.0)], steps=1),
        ]
    )
    assert first.waits_for == {2: 1.0} and first.exchange == 3.0
    assert second.waits_for == {0: 2.0, 2: 1.0} and second.exchange == 4.0
    assert third.waits_for == {}


def test_what_is_carried_while_the_rank_does_something_else_is_hidden():
    (one,) = attribute(
        [
            row(
                {},
                [("message 5 1", 1, "exchange", 14.0, 16.0, False)],
                transfers=[(10.0, 15.0), (11.0, 12.0), (17.0, 18.0)],
            )
        ]
    )
    assert one.hidden == (4.0 + 1.0) / 2


@pytest.mark.parametrize("bare", [None, 4.0])
def test_an_exchange_within_a_backward_is_what_the_backward_alone_does_not_take(bare):
    """Both compute 4 s; the second begins 2 s later; 3 s are carried."""
    tapes = [
        row({"forward": 2.0}, [("all 0", 1, "backward", 10.0, 19.0, True)], alone=3.0, bare=bare, steps=1),
        row({"forward": 2.0}, [("all 0", 1, "backward", 12.0, 19.0, True)], alone=3.0, bare=bare, steps=1),
    ]
    early, late = attribute(tapes)
    assert (early.backward, early.waiting, early.exchange) == (4.0, 2.0, 3.0)
    assert (late.backward, late.waiting, late.exchange) == (4.0, 0.0, 3.0)
    assert early.hidden == late.hidden == 0.0


def test_of_an_exchange_that_takes_longer_alone_the_rest_is_hidden():
    (one,) = attribute([row({}, [("all 0", 1, "backward", 10.0, 16.0, True)], alone=3.0, bare=5.0, steps=1)])
    assert (one.backward, one.exchange, one.hidden) == (5.0, 1.0, 2.0)


def part(rank: int = 0, **seconds: Any) -> RankTimes:
    own = sum(seconds.get(name, 0.0) for name in WORK_COMPONENTS)
    return RankTimes(rank=rank, host="a", step=seconds.pop("step", own), **seconds)


def facts(**more: Any) -> Facts:
    return Facts(**{"batch": 32, "degrees": {"data": 2}, "cores": 8, **more})


def measured(parts: list[RankTimes], **more: Any) -> Measured:
    return Measured(first=11, last=15, rank_times=parts, facts=facts(**more))


def test_so_many_workers_that_a_batch_is_there_in_each_step():
    waiting = part(data=0.080, forward=0.020, backward=0.010, busy=0.030, reading_on_core=0.0)
    assert workers_that_would_do([waiting], facts()) == (3, pytest.approx(0.030))
    # Reading and computing share four cores: 0.08 + 0.03 s of them.
    on_core = part(data=0.080, forward=0.020, backward=0.010, busy=0.110, reading_on_core=1.0)
    assert workers_that_would_do([on_core], facts(cores=2)) == (2, pytest.approx(0.055))
    two = part(data=0.020, forward=0.020, busy=0.02, workers_busy=0.0)  # two workers have 80 ms of reading
    assert workers_that_would_do([two], facts(num_workers=2)) == (4, pytest.approx(0.020))
    assert measured([two], num_workers=2).starvation() == (
        "50% of the time waits for data: loader.num_workers=4 would do (2 now; 40 ms → 20 ms a step)"
    )
    assert measured([part(data=0.001, forward=0.02)]).starvation() == ""


def test_gains_follow_from_the_parts():
    ranks = [
        part(0, forward=0.02, backward=0.04, update=0.01, exchange=0.05, step=0.12, wire={"exchange": 0.05}),
        part(1, forward=0.02, backward=0.04, update=0.01, exchange=0.05, step=0.12, wire={"exchange": 0.05}),
    ]
    found = {change.what.split(",")[0]: change.seconds for change in changes(ranks, facts())}
    assert found == {"train.batch=64": pytest.approx(0.09)}  # (0.24 - 0.06) / 2
    assert [change.what for change in changes([part(forward=0.02, backward=0.04)], facts(degrees={}))] == [
        "--ranks 2, on further devices or machines"
    ]


def test_a_bubble_shrinks_with_more_micro_batches():
    ranks = [part(n, forward=0.04, backward=0.08, waiting=0.03, step=0.15) for n in range(2)]
    (change, *_) = changes(ranks, facts(degrees={"pipeline": 2}, micro_batches=4))
    assert change.what == "train.micro_batches=8" and change.seconds == pytest.approx(0.15 - 0.12 / 8)


def test_recompute_is_left_out_where_memory_allows():
    one = [part(forward=0.03, backward=0.09)]
    assert changes(one, facts(recompute="full", free=2, peak=1, degrees={}))[0].seconds == pytest.approx(0.09)
    assert changes(one, facts(recompute="full", free=1, peak=2, degrees={}))[0].what.startswith("--ranks")


def test_lines_fit_80_columns_for_many_ranks_and_long_names():
    ranks = [
        part(
            n, data=1.25, forward=12.5, backward=123.4, exchange=1.0, hidden=0.5, waiting=3.0, waits_for={11: 3.0},
            update=0.1, callbacks=0.01, works={"MyVeryLongCallbackName.step": 0.01}, step=141.0,
        )
        for n in range(12)
    ]  # fmt: skip
    shown = measured(ranks).report()
    assert max(map(len, shown)) <= 80 and "(4 ranks with less" in "\n".join(shown)
    assert Measured.from_fields(measured(ranks).as_fields()).report() == shown
    assert "A rank sends 25.2 MB a step." in measured(ranks, sent=25.17e6).report()
    assert not [line for line in shown if "sends" in line]  # on accelerators


def test_advice_is_of_a_job_that_the_strategy_takes():
    """A job with servers needs two ranks, and one process with copies, or alone, cannot be two."""
    server = part(0, exchange=0.09, update=0.01)
    workers = [part(n, forward=0.01, backward=0.01, exchange=0.08, step=0.1) for n in (1, 2)]
    found = [each.what for each in changes([server, *workers], facts(servers=1, cores=2, local_ranks=3))]
    assert "--ranks 1 strategy.use=single" in found and not any("--ranks 2" in what for what in found)
    shown = measured([server, *workers], servers=1, sent=1e6).report()
    assert (
        "Rank 0 is a server." in shown
        and "A rank sends 1 MB a step, servers and workers in the mean." in shown
    )
    assert "Ranks 0 to 1 are servers." in measured([server, *workers], servers=2).report()
    (change,) = changes([part(forward=0.02, backward=0.04)], facts(degrees={}, one_process=True))
    assert change.what == "--ranks 2 strategy.use=data_parallel, on further devices or machines"
