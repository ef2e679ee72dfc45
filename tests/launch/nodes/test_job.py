"""What nodes do from joining to leaving, over loopback in one process: the ranks' work is played, everything else is
real."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch import attempts, logs, network
from paddle_dp.launch.command import Job, LaunchPlan, Meeting
from paddle_dp.launch.failures import Failure, describe
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.nodes import connections, rendezvous
from paddle_dp.launch.nodes import job as nodes
from paddle_dp.launch.nodes.job import end_of, result_of
from paddle_dp.launch.nodes.messages import MAX_LINE_BYTES
from paddle_dp.launch.nodes.rendezvous import NodeLimits
from paddle_dp.launch.processes import Signals
from paddle_dp.launch.rank_supply import RankSupply
from paddle_dp.launch.restarts import AttemptResult
from tests.eventually import eventually

Act = Callable[["Play", LaunchPlan, Any], AttemptResult | None]


def works(play: Play, plan: LaunchPlan, outside: Any) -> None:
    """The ranks are done, all at the same time."""


def waits(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult:
    """The ranks work until they are told to end, or to stop."""
    end = time.monotonic() + 5
    while not outside.must_end() and not outside.must_stop():
        assert time.monotonic() < end, "nobody ended this attempt"
        time.sleep(0.002)
    if outside.must_stop():
        return stops(play, plan, outside)
    return failure(plan, "LostPeerError", "it lost a peer")


def stops(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult:
    return failure(plan, "StoppedError", "stopped after step 7", status=75)


def raises(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult:
    return failure(plan, "ValueError", "the culprit's own words")


def failure(plan: LaunchPlan, kind: str, message: str, status: int = 1) -> AttemptResult:
    cause = Failure(
        rank=plan.node * plan.ranks, kind=kind, message=message, traceback=f"{kind}: {message}", exit_status=status,
        expected=kind == "StoppedError", host=f"host{plan.job.node_rank}",
    )  # fmt: skip
    return AttemptResult(attempt=Path("attempt"), status=status, cause=cause, step=7)


class Play:
    """Nodes of one job; `acts` by node: what its ranks do in each attempt that it takes part in."""

    def __init__(self, folder: Path, **limits: Any):
        self.folder, self.port = folder, network.free_port(random.randrange(61_000, 63_000))
        self.limits = NodeLimits(**{"least": 2, "most": 2, "gather": 5.0, "rejoin": 5.0, **limits})
        self.acts: dict[int, list[Act]] = {}
        self.seen: list[tuple[int, int, int, int, str | None]] = []  # node, its place, nodes, ranks, resume
        self.status: dict[int, int] = {}
        self.threads: list[threading.Thread] = []
        self.opened: list[tuple[int, bool]] = []

    def run_once(
        self,
        plan: LaunchPlan,
        attempt: Path,
        inherited: Any,
        point: Any,
        started: float,
        outside: Any,
        prepared: Any,
    ) -> AttemptResult:
        number = plan.job.node_rank or 0
        self.seen.append((number, plan.node, plan.nodes, plan.ranks, point.resume))
        result = self.acts[number].pop(0)(self, plan, outside)
        return replace(result or AttemptResult(attempt=attempt, status=0), began=point.step)

    def start(
        self, number: int, *acts: Act, restarts: int = 0, ranks: int = 1, least_ranks: int | None = None
    ) -> None:
        self.acts[number] = list(acts)
        job = Job(
            recipe=Path("r.yaml"), nodes=self.limits.most, master=f"127.0.0.1:{self.port}", node_rank=number,
            restarts=restarts, quiet=True, least_ranks=least_ranks,
        )  # fmt: skip
        plan = LaunchPlan(job=job, machine=Machine(cores=1), ranks=ranks, nodes=self.limits.most)

        def opened(goes_on: bool) -> tuple[LaunchPlan, Path]:
            self.opened.append((number, goes_on))
            return plan, logs.fresh(self.folder / f"run{number}")

        supply = RankSupply(plan=plan, run=self.folder, obstacle=lambda ranks: "")

        def run() -> None:
            try:
                self.status[number] = nodes.run(supply, self.limits, opened, {})
            except UsageError as error:
                self.status[number] = 2
                print(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self) -> dict[int, int]:
        for thread in self.threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), "a node did not end"
        return self.status


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Play]:
    for module, name, seconds in (
        (connections, "TICK", 0.005), (connections, "BEAT", 0.02), (connections, "RETRY_INTERVAL", 0.01),
        (nodes, "TICK", 0.005), (rendezvous, "SETTLE", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr("paddle_dp.launch.restarts.FIRST_WAIT", 0.01)

    def make(**limits: Any) -> Play:
        made = Play(tmp_path, **limits)
        monkeypatch.setattr(attempts, "run_once", made.run_once)
        return made

    return make


def test_two_nodes_do_one_attempt(play):
    job = play()
    job.start(1, works)
    job.start(0, works)
    assert job.end() == {0: 0, 1: 0}
    assert sorted(job.seen) == [(0, 0, 2, 1, None), (1, 1, 2, 1, None)]


def test_one_nodes_failure_is_every_nodes_status_and_text(play, capsys):
    job = play()
    job.start(0, waits)
    job.start(1, raises)
    assert job.end() == {0: 1, 1: 1}
    said = capsys.readouterr().err
    assert said.count("ValueError: the culprit's own words") == 2
    assert said.count("rank 1 of 2 on host1 failed first") == 2
    assert said.count("then rank 0: LostPeerError: it lost a peer") == 1  # on its own node


def test_all_start_again_after_a_failure(play, capsys):
    job = play()
    job.start(0, waits, works, restarts=2)
    job.start(1, raises, works, restarts=2)
    assert job.end() == {0: 0, 1: 0}
    assert [number for number, *_ in job.seen].count(1) == 2
    said = capsys.readouterr().err
    assert said.count("failed: rank 1 of 2 on host1: ValueError: the culprit's own words") == 2
    assert len(re.findall(r"starts again from the beginning in \d s \(restart 1 of 2", said)) == 2


def test_the_budget_of_restarts_is_the_whole_jobs(play, capsys):
    job = play()
    job.start(0, waits, raises, restarts=1)
    job.start(1, raises, waits, restarts=1)
    assert job.end() == {0: 1, 1: 1}
    assert capsys.readouterr().err.count("not started again: the restart was spent") == 2


def test_a_node_leaves_out_its_rank_that_fails_first_twice_in_a_row(play, capsys, monkeypatch):
    """Also where it takes longer for that than the wait before another attempt."""
    note_lost = RankSupply.note_lost
    monkeypatch.setattr(RankSupply, "note_lost", lambda *args: (time.sleep(0.3), note_lost(*args))[1])
    job = play()
    job.start(0, waits, waits, works, restarts=3, ranks=2, least_ranks=1)
    job.start(1, raises, raises, works, restarts=3, ranks=2, least_ranks=1)
    assert job.end() == {0: 0, 1: 0}
    assert [ranks for *_, ranks, _ in job.seen] == [2, 2, 2, 2, 1, 1]
    why = "1 of at most 2 ranks: rank 2 was the first to fail 2 times in a row"
    assert capsys.readouterr().err.count(why) == 1  # on its node


def test_a_node_that_says_too_late_how_many_ranks_it_has_says_it_in_the_next_attempt(play, monkeypatch):
    note_lost = RankSupply.note_lost
    monkeypatch.setattr(
        RankSupply,
        "note_lost",
        lambda supply, *args: (time.sleep(float(supply.plan.job.node_rank)), note_lost(supply, *args))[1],
    )
    monkeypatch.setattr(rendezvous, "GRACE", 0.3)
    job = play()
    job.start(0, waits, waits, waits, works, restarts=3, ranks=2, least_ranks=1)
    job.start(1, raises, raises, waits, works, restarts=3, ranks=2, least_ranks=1)
    assert job.end() == {0: 0, 1: 0}
    assert [ranks for *_, ranks, _ in job.seen] == [2, 2, 2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("kind", ["LostPeerError", "stood still"])
def test_no_node_leaves_out_a_rank_that_may_have_waited_for_another_node(play, kind):
    """Where the network failed, the rank that noted it first lost its GPU."""

    def waited(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult:
        return failure(plan, kind, "rank 0 does not answer")

    job = play()
    job.start(0, waits, waits, works, restarts=3, ranks=2, least_ranks=1)
    job.start(1, waited, waited, works, restarts=3, ranks=2, least_ranks=1)
    assert job.end() == {0: 0, 1: 0}
    assert [ranks for *_, ranks, _ in job.seen] == [2] * 6


def test_no_node_leaves_out_a_rank_for_an_error_that_all_raise(play, capsys):
    job = play()
    for number in (0, 1):
        job.start(number, raises, raises, raises, works, restarts=9, ranks=1, least_ranks=1)
    assert job.end() == {0: 1, 1: 1}
    assert [ranks for *_, ranks, _ in job.seen] == [1] * 6
    said = capsys.readouterr().err
    assert said.count("failed: all 2 ranks: ValueError: the culprit's own words") == 4
    assert said.count("the same failure three times after step 7") == 2


def test_all_stop_when_one_is_asked_to(play):
    job = play()
    job.start(0, stops, restarts=3)
    job.start(1, stops, restarts=3)
    assert job.end() == {0: 75, 1: 75}


def told(number: int, *, wait: float = 0.0, again: int = 0) -> Act:
    """The ranks stop in good order after a signal; after `wait` seconds. `again`: another signal comes later."""

    def act(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult:
        if number:
            outside.signals.record(number, None)
        if again:
            threading.Timer(0.1, outside.signals.record, (again, None)).start()
        time.sleep(wait)
        return replace(stops(play, plan, outside), signal=outside.signals.name)

    return act


def test_a_signal_that_was_obeyed_ends_nobody_who_waits_for_the_others(play):
    """Slurm requeues a job that ends with 75 alone: a node whose ranks had stopped left with 138 after 0.2 s."""
    job = play()
    job.start(0, told(0, wait=0.5))
    job.start(1, told(signal.SIGUSR1))
    assert job.end() == {0: 75, 1: 75}


def test_the_signal_of_a_stop_may_come_after_the_ranks_have_stopped(play):
    """ssh.sh sends SIGTERM to each host: node 0's ranks stopped node 1's, which left with 143 at its own, later one."""
    job = play()
    job.start(0, told(signal.SIGTERM, wait=0.5))
    job.start(1, told(0, again=signal.SIGTERM))
    assert job.end() == {0: 75, 1: 75}


def test_a_signal_that_comes_as_an_attempt_begins_ends_the_others_ranks(play, monkeypatch, capsys):
    """They waited for the ranks of that node as long as `watch.start` allows, and the job ended with 124."""
    begin = nodes._Node._begin

    def begins_late(node: Any, message: Any) -> None:
        if node.number == 1:
            node.signals.record(signal.SIGTERM, None)
        begin(node, message)

    monkeypatch.setattr(nodes._Node, "_begin", begins_late)
    job = play()
    job.start(0, waits)
    job.start(1)
    assert job.end() == {0: 143, 1: 143}
    assert "was ended by SIGTERM." in capsys.readouterr().err


def test_a_signal_after_a_stop_for_another_node_ends_the_job_that_goes_on(play, monkeypatch):
    """It was taken for the request to stop: the node began no ranks and did not leave, and the others waited."""
    begin = nodes._Node._begin

    def begins_late(node: Any, message: Any) -> None:
        if node.number == 1 and message["attempt"] == 2:
            node.signals.record(signal.SIGTERM, None)
        begin(node, message)

    monkeypatch.setattr(nodes._Node, "_begin", begins_late)
    job = play(most=3, rejoin=0.1)
    job.start(0, waits, waits)
    job.start(1, waits)
    eventually(lambda: len(job.seen) == 2)
    job.start(2, waits)
    assert job.end() == {0: 143, 1: 143, 2: 143}


def test_a_second_signal_ends_a_node_that_waits_for_the_others(play, monkeypatch):
    monkeypatch.setattr(nodes, "FAREWELL", 0.1)
    job = play()
    job.start(0, told(0, wait=1.0))
    job.start(1, told(signal.SIGUSR1, again=signal.SIGINT))
    assert job.end()[1] == 128 + signal.SIGUSR1


def test_a_job_grows_when_a_node_comes_later(play, capsys):
    job = play(least=1, rejoin=0.1)
    job.start(0, waits, works)
    while not job.seen:
        time.sleep(0.002)
    job.start(1, works)
    assert job.end() == {0: 0, 1: 0}
    assert job.seen[0] == (0, 0, 1, 1, None)
    assert sorted(job.seen[1:]) == [(0, 0, 2, 1, None), (1, 1, 2, 1, None)]
    assert "goes on from the beginning on 2 ranks of nodes 0, 1" in capsys.readouterr().err


def test_a_node_that_connects_again_says_how_many_ranks_it_has_now(tmp_path):
    """It said how many it had at first: the next attempt had more ranks than its file allows, and they stayed."""
    job = Job(recipe=Path("r.yaml"), ranks=4, least_ranks=2, nodes=2, node_rank=1)
    plan = LaunchPlan(job=job, machine=Machine(cores=4), ranks=4, nodes=2)
    supply = RankSupply(plan=plan, run=tmp_path, obstacle=lambda ranks: "")
    limits = NodeLimits(least=2, most=2)
    hello = {"node": 1, "host": "127.0.0.1", "name": "host1", "ranks": supply.offered().ranks}
    with connections.Server(rendezvous.Rendezvous(limits), ("127.0.0.1", 0), b"") as server:
        address = ("127.0.0.1", server.port)
        member = connections.Membership(address, hello, b"")
        meeting = Meeting(master=f"127.0.0.1:{server.port}", host="127.0.0.1")
        node = nodes._Node(
            supply=supply, limits=limits, open=lambda again: (plan, tmp_path), inherited={}, member=member,
            meeting=meeting, signals=Signals(), server=None, secret=b"",
        )  # fmt: skip
        (tmp_path / "ranks").write_text("3")
        node._must_stop()  # while an attempt runs, and node 0 is out of reach
        with member:
            eventually(lambda: member.connected)
            assert server.rendezvous.members[1].ranks == 3


def test_a_node_notes_no_failure_of_an_attempt_without_it(tmp_path, capsys):
    """Its rank of the same number was left out, though it had failed once, or never."""
    job = Job(recipe=Path("r.yaml"), ranks=2, least_ranks=1, nodes=2, node_rank=1)
    plan = LaunchPlan(job=job, machine=Machine(cores=2), ranks=2, nodes=2, node=1)
    supply = RankSupply(plan=plan, run=tmp_path, obstacle=lambda ranks: "")
    limits = NodeLimits(least=1, most=2)
    member: Any = SimpleNamespace(attempt=1, hello={"ranks": 2}, send=lambda **message: None)
    node = nodes._Node(
        supply=supply, limits=limits, open=lambda again: (plan, tmp_path), inherited={}, member=member,
        meeting=Meeting(master="", host=""), signals=Signals(), server=None, secret=b"", plan=plan, logs=tmp_path,
    )  # fmt: skip
    end = end_of(raises(Play(tmp_path), plan, None), 0, False)
    again = {"node": 0, "words": end["words"], "told": {"wait": 0.0, "number": 1, "where": "the beginning"}}
    for attempt, lost in ((1, []), (2, []), (3, ["2"])):
        member.attempt = 1 if attempt == 2 else attempt
        node._restart({**again, "attempt": attempt})
        assert supply.lost == lost
    assert capsys.readouterr().err.count("starts again") == 2


def test_a_node_that_nobody_joins_says_so(play, capsys):
    job = play(gather=0.1)
    job.start(0)
    assert job.end() == {0: 124}
    said = capsys.readouterr().err
    assert "node 1 did not come within 0 s (watch.start). Node 0 waits at 127.0.0.1:" in said


def test_a_node_without_a_node_0_says_so(play, capsys):
    job = play(gather=0.1)
    job.start(1)
    assert job.end() == {1: 124}
    assert "no answer at 127.0.0.1:" in capsys.readouterr().err


def test_a_node_whose_number_another_one_has_says_so(play, capsys, monkeypatch):
    """It said for ten minutes that nobody answers."""
    monkeypatch.setattr(nodes, "NOTICE", 0.3)
    job = play(least=3, most=3, gather=1.0)
    for number in (0, 1, 1):
        job.start(number)
    job.end()
    said = capsys.readouterr().err
    assert re.search(r"not let in at \S+ yet, waiting for 1 s at most \(watch.start\). node 1 \(", said)
    assert "is here already: give every machine another --node-rank.\n" in said


def test_a_node_without_a_node_0_says_after_seconds_that_it_waits(play, capsys, monkeypatch):
    monkeypatch.setattr(nodes, "NOTICE", 0.05)
    job = play(gather=0.3)
    job.start(1)
    assert job.end() == {1: 124}
    said = capsys.readouterr().err
    assert said.count("yet, waiting for 0 s at most (watch.start). Is node 0 running") == 1


def test_who_has_node_0s_port_is_not_called_node_0(play, capsys):
    job = play()
    with socket.create_server(("127.0.0.1", job.port)) as ear:
        job.start(1)
        end, _ = ear.accept()
        with end:
            end.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            assert job.end() == {1: 2}
    said = capsys.readouterr().out
    assert (
        f"--master 127.0.0.1:{job.port}: the program that answers there is no node of paddle-dp. If another"
        in said
    )
    assert "does not let" not in said


def test_a_rendezvous_that_accepts_and_says_nothing_is_waited_for_as_one_that_is_gone(
    play, monkeypatch, capsys
):
    """As node 0's whose process is stopped: the kernel takes connections for it."""

    def silences(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult | None:
        monkeypatch.setattr(connections.Server, "_tell", lambda *_: None)
        return waits(play, plan, outside)

    job = play(silence=0.1, rejoin=0.5)
    job.start(0, silences, restarts=2)
    job.start(1, waits, restarts=2)
    assert job.end() == {0: 1, 1: 1}
    said = capsys.readouterr().err
    assert said.count("is lost: nothing was heard of it") == 2  # each says it once
    assert len(re.findall(r"node 0 did not return to \S+ within \d s \(watch.rejoin\)", said)) == 2


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_rendezvous_that_breaks_ends_the_job_with_its_cause(play, monkeypatch, capsys, restarts):
    def breaks(play: Play, plan: LaunchPlan, outside: Any) -> AttemptResult | None:
        monkeypatch.setattr(rendezvous.Rendezvous, "look", None)
        return waits(play, plan, outside)

    job = play(rejoin=0.5)
    job.start(0, breaks, restarts=restarts)
    job.start(1, waits, restarts=restarts)
    assert job.end() == {0: 1, 1: 1}
    said = capsys.readouterr().err
    assert (
        "the rendezvous of this job has failed: Traceback" in said
        and "'NoneType' object is not callable" in said
    )


def test_a_failure_that_nobody_understands_is_a_failure(play, monkeypatch, capsys):
    monkeypatch.setattr(
        nodes, "end_of", lambda *_: {"how": "failed", "words": {"failure": {"odd": 1}, "log": None}}
    )
    job = play()
    job.start(0, waits)
    job.start(1, raises)
    assert job.end() == {0: 1, 1: 1}
    assert "failed, and this node cannot read its report" in capsys.readouterr().err


def test_a_port_that_another_program_takes_at_the_last_moment_is_named(play, capsys, monkeypatch):
    job = play()
    monkeypatch.setattr(network, "_is_free", lambda port: True)
    with socket.create_server(("127.0.0.1", job.port)):
        job.start(0)
        assert job.end() == {0: 2}
    assert f"{job.port}: Address already in use" in (said := capsys.readouterr().out)
    assert said.endswith(": give another port.\n")


def test_a_number_too_high_is_refused(play, capsys):
    job = play()
    job.start(0, works)
    job.start(2)
    job.threads[1].join(timeout=5)
    assert job.status == {2: 2}
    assert (
        "node 0 does not let this node in: there are 2 nodes, with --node-rank 0 to 1"
        in capsys.readouterr().out
    )
    job.start(1, works)
    assert job.end() == {0: 0, 1: 0, 2: 2}


def test_a_run_that_cannot_be_opened_ends_all(play, capsys):
    job = play()
    job.folder = Path("/proc/nowhere")
    job.start(1)
    job.start(0)
    assert job.end() == {0: 2, 1: 2}
    assert capsys.readouterr().err.count("/proc/nowhere/run0/logs cannot be written") == 2
    assert job.seen == []


# What a node says of an attempt's end fits into a line, whatever it was, and other nodes can show it.


def cause_of(**more) -> Failure:
    return Failure(
        **{"rank": 1, "kind": "ValueError", "message": "no", "traceback": "ValueError: no", **more}
    )


def test_the_longest_failure_fits_into_a_line():
    worst = "\x00" * 100_000  # six characters each in JSON
    cause = cause_of(message=worst, traceback=worst, waited=worst, host="h")
    own = AttemptResult(attempt=Path("a"), status=1, cause=cause, consequences=[cause] * 100)
    assert len(json.dumps(end_of(own, 1, False))) < MAX_LINE_BYTES - 200


def test_the_end_of_a_traceback_is_kept():
    cause = cause_of(traceback="x" * 100_000 + "ValueError: the last line")
    told = end_of(AttemptResult(attempt=Path("a"), status=1, cause=cause), 1, False)
    shown = result_of({**told, "node": 1}, Path("b"), 0, None)
    assert describe(shown.cause, 2, None).splitlines()[0].endswith("ValueError: the last line")


@pytest.mark.parametrize(
    ("own", "told_to_end", "how"),
    [
        (AttemptResult(attempt=Path("a"), status=0), False, "done"),
        (AttemptResult(attempt=Path("a"), status=0), True, "ended"),
        (AttemptResult(attempt=Path("a"), status=75, cause=cause_of(kind="StoppedError")), False, "stopped"),
        (AttemptResult(attempt=Path("a"), status=130, signal="SIGINT"), False, "failed"),
        (AttemptResult(attempt=Path("a"), status=1), True, "failed"),
        (AttemptResult(attempt=Path("a"), status=1, cause=cause_of()), True, "failed"),
    ],
)
def test_how_an_attempt_ended(own, told_to_end, how):
    assert end_of(own, 1, told_to_end)["how"] == how


def test_a_signal_to_one_nodes_supervisor_is_final_for_all():
    told = end_of(AttemptResult(attempt=Path("a"), status=143, signal="SIGTERM"), 1, False)
    assert not told["consequence"]  # as a rank's SIGTERM would be
    result = result_of({**told, "node": 1}, Path("b"), 0, None)
    assert result.final and result.status == 143
    assert result.cause.message == "node 1 was ended by SIGTERM."


def test_what_followed_here_is_shown_with_anothers_cause():
    told = end_of(AttemptResult(attempt=Path("a"), status=1, cause=cause_of()), 1, False)
    own = AttemptResult(
        attempt=Path("b"), status=134, cause=cause_of(rank=0, kind="SIGABRT", message="ended by SIGABRT")
    )
    assert [other.rank for other in result_of({**told, "node": 1}, Path("b"), 0, own).consequences] == [0]
    assert result_of({**told, "node": 1}, Path("b"), 1, own).consequences == []
