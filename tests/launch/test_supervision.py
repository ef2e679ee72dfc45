"""Which failure is the cause, when a rank left without a word and its peer is the one that complains."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from paddle_dp.launch import supervisor
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.processes import Signals
from paddle_dp.launch.rank_monitor import Departure
from paddle_dp.launch.supervisor import ExternalEvents, Supervision, nobody_came
from paddle_dp.mesh.heartbeat import Heartbeat, StatusTable
from paddle_dp.mesh.late_ranks import WAITED, Arrivals, Wait

LOST = "[/gloo/transport/tcp/pair.cc:584] TIMEOUT self_rank = 0 pair_rank = 1"


@pytest.fixture
def supervision(tmp_path):
    plan = SimpleNamespace(nodes=1, ranks=2, numbers=range(2))
    process = SimpleNamespace(pid=2**22, poll=lambda: None, ranks=dict)
    made = Supervision(plan, process, tmp_path, "mark", ExternalEvents(signals=Signals()))
    Failure(rank=0, kind="RuntimeError", message=LOST, time=100.0).write(tmp_path)
    return made


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "left with exit status 0"),
        (None, "left with an unknown exit status"),
        (3, "left with exit status 3"),
    ],
)
@pytest.mark.parametrize("when", [99.0, 101.0])
def test_a_rank_that_left_is_the_cause_of_a_lost_peer(supervision, code, said, when):
    supervision.monitor.departures = {1: Departure(rank=1, pid=7, time=when, code=code)}
    cause = supervision._failed().cause
    assert cause.rank == 1
    assert said in cause.message


def test_a_code_that_the_launcher_saw_first_is_the_one_that_it_wrote(supervision, tmp_path):
    words = "Container rank {0} status failed cmd ['python', 'x.py'] code {1} log {2}/workerlog.{0}\n"
    log = "LAUNCH ERROR\n" + words.format(0, -6, tmp_path) + words.format(1, -11, tmp_path)
    (tmp_path / "launcher.log").write_text(log)
    failure = supervision._departure_failure(Departure(rank=1, pid=7, time=99.0, code=None))
    assert (failure.kind, failure.exit_status) == ("SIGSEGV", 139)


def test_a_rank_that_ended_much_later_is_not(supervision):
    supervision.monitor.departures = {1: Departure(rank=1, pid=7, time=110.0, code=0)}
    assert supervision._failed().cause.rank == 0


@pytest.mark.parametrize(
    ("code", "restarts", "quick"),
    [(-9, 3, True), (-9, 0, False), (-6, 3, False), (3, 3, False), (0, 3, False)],
)
def test_only_after_a_kill_of_a_job_that_starts_again_the_others_are_hurried(
    supervision, code, restarts, quick
):
    supervision.plan.job = SimpleNamespace(restarts=restarts)
    supervision.monitor.departures = {1: Departure(rank=1, pid=7, time=99.0, code=code)}
    assert supervision._settle() == (supervisor.KILLED_SETTLE if quick else supervisor.SETTLE)


@pytest.mark.parametrize(
    ("script", "passed", "said"), [(("own.py",), 61.0, True), (("own.py",), 59.0, False), ((), 61.0, False)]
)
def test_a_rank_of_a_script_that_has_left_the_others_is_told_once(supervision, capsys, script, passed, said):
    supervision.plan.job = SimpleNamespace(script=script)
    supervision.monitor.pids = {0: 6, 1: 7}
    supervision.monitor.departures = {1: Departure(rank=1, pid=7, time=100.0, code=0)}
    for _ in range(2):
        supervision._report_departures(100.0 + passed)
    words = "rank 1 has ended with exit status 0, and rank 0 has gone on for 60 s without it"
    assert capsys.readouterr().err.count(words) == said


@pytest.mark.parametrize(
    ("code", "waited"), [(-6, "rank 0 has waited 40 s for ranks 1, 2 in the exchange of gradients"), (-9, "")]
)
def test_whom_an_aborted_rank_waited_for_stands_in_its_log(supervision, tmp_path, code, waited):
    """In C++ a late rank ends the process that waits for it; the last line that it wrote of its waiting is told."""
    lines = [f"rank 0 has waited {s} s for ranks 1, 2 in the exchange of gradients" for s in (20, 40)]
    (tmp_path / "workerlog.0").write_text("\n".join(["begin", *lines, *["Fatal Python error: Aborted"] * 60]))
    assert supervision._departure_failure(Departure(rank=0, pid=7, time=99.0, code=code)).waited == waited


def test_the_line_that_is_looked_for_is_the_one_that_is_written(capsys):
    arrivals = Arrivals(0, lambda: None)
    arrivals.counts["all"] = 1
    store = SimpleNamespace(get=lambda key: b'{"counts": {}, "step": 0, "phase": "data"}')
    for members in ([0, 1], [0, 1, 2]):
        arrivals._report(Wait("all", members, "'an exchange between all ranks'", 0.0), store, 21.3)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(WAITED.fullmatch(line) for line in said), said


@pytest.mark.parametrize(("nodes", "said"), [(1, "(watch.start). Output"), (2, "--master's? Output")])
def test_the_path_of_a_log_is_not_changed_by_the_message(nodes, said):
    """ "why?.1" lost its dot."""
    message = nobody_came(SimpleNamespace(nodes=nodes), 60, Path("runs/why?.1"))
    assert said in message and message.endswith("launcher: runs/why?.1/launcher.log")


@pytest.mark.parametrize(("nodes", "stopped", "over"), [(1, False, True), (2, False, False), (2, True, True)])
def test_a_stopped_launcher_of_several_nodes_is_not_waited_for(
    supervision, monkeypatch, nodes, stopped, over
):
    """It ends after its ranks, when other nodes' launchers need it no more; a stopped one never ends."""
    (supervision.attempt / "failure.rank-0.json").unlink()
    supervision.plan.nodes, supervision.plan.job = nodes, SimpleNamespace(script=())
    monkeypatch.setattr(supervisor, "is_stopped", lambda pid: stopped and pid == supervision.process.pid)
    supervision.monitor.pids = {0: 6, 1: 7}
    supervision.monitor.departures = {
        rank: Departure(rank=rank, pid=6 + rank, time=99.0, code=0) for rank in (0, 1)
    }
    assert supervision._over() is over


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_signal_to_a_node_whose_ranks_stop_at_another_nodes_request_is_the_same_request(
    supervision, monkeypatch, capsys, has_ended
):
    """ssh.sh sends SIGTERM to each host. One that it reached while its rank closed its files, or had just ended, left
    with 143 in place of 75."""
    board, sent = StatusTable(1), []
    try:
        supervision.board, supervision.plan.numbers = board, range(1)
        own = Heartbeat()
        board.give(own)
        own.will_stop = True  # and its handlers of signals are the former ones again
        own.enter("checkpoint")
        ended = iter([False, True])
        monkeypatch.setattr(supervision, "_over", lambda: has_ended or next(ended))
        monkeypatch.setattr(supervision.monitor, "rest", lambda seconds: None)
        monkeypatch.setattr(supervisor, "send", lambda pids, number: sent.append(number))
        signals = supervision.outside.signals
        signals.record(signal.SIGTERM, None)
        supervision._wait_until_over(SimpleNamespace(size=0, follow=lambda size: None))
        assert not supervision._ends_at_once(signals.times) and supervision._ends_at_once(2)
        assert not sent and ("SIGTERM: stopping" in capsys.readouterr().err) is not has_ended
    finally:
        board.close()
