"""Which ranks are late to an exchange follows from how many exchanges each has entered."""

import json
import time

import pytest

from paddle_dp.errors import JobError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.late_ranks import WAIT_OVER, WAITED, Arrivals, Wait, longest_wait
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
    write(store, 1, {"all": 1})
    write(store, 2, {})
    mine._open = lambda: store
    mine.start(store)

    def exchange():
        with mine.waiting("all", range(3), "a sum"):
            time.sleep(0.4)
            raise RuntimeError("gloo: TIMEOUT")

    with pytest.raises(JobError, match="rank 0 has waited 0 s for rank 2 in a sum"):
        exchange()
    mine._stop.set()
    assert "rank 0 has waited 0 s for rank 2 in a sum\n" in capfd.readouterr().err


def write(store, rank, counts, step=0):
    status = {"counts": counts, "step": step, "phase": "data"}
    store.set(f"paddle_dp/arrivals/{rank}", json.dumps(status))


@pytest.mark.parametrize(("step", "phase"), [(7, " (in data)"), (6, "")])
def test_a_wait_that_is_over_is_a_line_of_the_log(capfd, monkeypatch, step, phase):
    """With the late rank's phase, unless that is of another step."""
    monkeypatch.setattr(heartbeat, "step", 7)
    mine, store = arrivals(), Store()
    write(store, 1, {}, step)
    with mine.waiting("all", range(2), "a sum"):
        mine._report(mine._waits[0], store, 21.0)
        mine._waits[0].since -= 40.6
    with mine.waiting("all", range(2), "a sum"):  # nobody is late
        pass
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "rank 0 has waited 21 s for rank 1 in a sum",
        f"rank 0 waited 41 s for rank 1{phase} in a sum after step 7",
    ]


@pytest.mark.parametrize(("late", "phase"), [((1,), ""), ((1, 12), "data"), ((3,), "forward")])
def test_each_line_of_a_wait_is_found_in_a_log_and_by_its_own_pattern(late, phase):
    wait = Wait("all", range(16), "the exchange of gradients, bucket 2", 0.0, late, phase)
    waits, over = wait.line(0, 20.4), f"{wait.line(0, 41.0, is_over=True)} after step 7"
    log = f"begin\n{waits}\n{over}\nend\n"
    assert WAITED.findall(log) == [waits]
    assert [(found[0], found[1]) for found in WAIT_OVER.finditer(log)] == [(over, "41")]


def test_the_longest_wait_of_all_attempts_and_nodes_is_in_their_logs(tmp_path):
    line = "rank {} waited {} s for rank 1 (in data) in a sum after step 7"
    run, waits = tmp_path / "a[1]", [("", 1, 0, 21), ("", 2, 3, 40), (".node-1", 1, 2, 103), ("2", 1, 0, 500)]
    assert longest_wait(run) == ""
    for node, attempt, rank, seconds in waits:
        log = run.with_name(f"{run.name}{node}") / f"logs/attempt-00{attempt}/workerlog.{rank}"
        log.parent.mkdir(parents=True)
        log.write_bytes(
            f"begin \xff\n{line.format(rank, seconds)}\nrank 0 has waited 900 s\n".encode("latin1")
        )
    assert longest_wait(run) == line.format(2, 103)


def test_another_error_stays_what_it_is():
    def exchange():
        with arrivals().waiting("all", range(3), "a sum"):
            raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        exchange()
