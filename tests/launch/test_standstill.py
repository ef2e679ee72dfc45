"""When a job counts as standing still, and whom it names: from heartbeats alone."""

from __future__ import annotations

import io
import math
import os
import pdb  # noqa: T100
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.launch.command import Limits
from paddle_dp.launch.standstill import MAX_GAP, StandstillDetector, in_debugger
from paddle_dp.mesh.heartbeat import Heartbeat, RankStatus, StatusTable
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration
from tests.eventually import eventually


def limits(sample_seconds: float = 120.0, **watch: str) -> Limits:
    return Limits(
        watch=WatchSettings(**{name: Duration.parse(text) for name, text in watch.items()}),
        sample_seconds=sample_seconds,
    )


def beat(count: int = 1, phase: str = "forward", step: int = 12, **more) -> RankStatus:
    return RankStatus(count=count, time=float(step), step=step, phase=phase, **more)


def work(detector: StandstillDetector, ranks: int = 2, steps: int = 5, seconds: float = 1.0) -> float:
    """Some steps that go well; returns when the last was seen."""
    for step in range(steps):
        beats = {
            rank: RankStatus(count=step + 2, time=step * seconds, step=step, phase="update")
            for rank in range(ranks)
        }
        assert detector.look(beats, step * seconds) is None
    return (steps - 1) * seconds


def look_for(detector: StandstillDetector, beats, start: float, seconds: float, stopped=()):
    """Looks every second; the first standstill and when it was found."""
    for second in range(1, int(seconds) + 1):
        if found := detector.look(beats, start + second, stopped):
            return found, second
    return None, seconds


def test_a_rank_in_data_is_named_with_its_sample_and_the_others_wait():
    detector = StandstillDetector(limits(sample_seconds=1.0))
    start = work(detector, ranks=4)
    beats = {
        0: beat(7, "backward", waits=True, activity="the exchange of gradients"),
        1: beat(9, "data", sample=4711),
        2: beat(7, "backward", waits=True, activity="the exchange of gradients"),
        3: beat(7, "backward", waits=True, activity="the exchange of gradients"),
    }
    found, seconds = look_for(detector, beats, start, 100)
    assert found and found.blocking_ranks == [1] and 60 <= seconds <= 62
    assert str(found) == (
        "no rank has made progress for 60 s (allowed are 60 s: watch.patience): "
        "rank 1 has been in data of step 13 (sample 4711) for 60 s; "
        "ranks 0, 2, 3 wait in backward of step 13 (the exchange of gradients)."
    )


def test_any_sign_of_life_of_any_rank_is_progress():
    detector = StandstillDetector(limits())
    start = work(detector)
    for second in range(200):
        beats = {0: beat(7, "backward", waits=True), 1: beat(100 + second // 50)}
        assert detector.look(beats, start + second) is None


@pytest.mark.parametrize(("step", "allowed"), [(0.5, 60), (6.0, 60), (20.0, 200)])
def test_patience_is_ten_median_steps_and_a_minute_at_least(step, allowed):
    detector = StandstillDetector(limits(sample_seconds=1.0))
    start = work(detector, seconds=step)
    assert detector.patience() == allowed
    _, seconds = look_for(detector, {0: beat(99), 1: beat(99, waits=True)}, start, 300)
    assert allowed <= seconds <= allowed + 2


@pytest.mark.parametrize(
    ("phase", "allowed", "setting"),
    [
        ("start", 300, "watch.start"),
        ("data", 125, "loader.timeout"),
        ("forward", 60, "watch.patience"),
        ("evaluate", 70, "watch.evaluate"),
        ("checkpoint", 80, "watch.checkpoint"),
        ("callbacks", 90, "watch.callbacks"),
        ("end", 60, "watch.patience"),
        ("done", 60, "watch.patience"),
        ("unwatched", math.inf, ""),
    ],
)
def test_each_phase_has_its_own_patience_and_says_which(phase, allowed, setting):
    words = {"start": "300 s", "evaluate": "70 s", "checkpoint": "80 s", "callbacks": "90 s"}
    detector = StandstillDetector(limits(**words))
    found, seconds = look_for(
        detector, {0: beat(99, phase), 1: beat(99, "forward", waits=True)}, work(detector), 400
    )
    if allowed == math.inf:
        assert found is None
    else:
        assert allowed <= seconds <= allowed + 2 and found.setting == setting


def test_until_steps_are_done_the_first_one_may_take_as_long_as_the_start():
    detector = StandstillDetector(limits(start="200 s", sample_seconds=1.0))
    _, seconds = look_for(detector, {0: beat(5, step=0), 1: beat(5, step=0, waits=True)}, 0.0, 300)
    assert 200 <= seconds <= 202


def test_a_machine_that_was_stopped_as_a_whole_has_not_stood_still():
    detector = StandstillDetector(limits(sample_seconds=1.0))
    start = work(detector)
    beats = {0: beat(9), 1: beat(9, waits=True)}
    assert detector.look(beats, start + 1) is None
    assert detector.look(beats, start + 3600) is None  # nobody looked either: counted as MAX_GAP seconds
    found, seconds = look_for(detector, beats, start + 3600, 100)
    assert found and 58 - MAX_GAP <= seconds <= 60


def test_a_stopped_rank_is_named_wherever_it_is():
    detector = StandstillDetector(limits(sample_seconds=1.0))
    beats = {rank: beat(9, "backward", waits=True, activity="the exchange of gradients") for rank in range(4)}
    found, _ = look_for(detector, beats, work(detector, ranks=4), 100, stopped=[2])
    assert found.blocking_ranks == [2] and "rank 2 is stopped (by SIGSTOP" in str(found)
    assert "ranks 0, 1, 3 wait in backward of step 13" in str(found)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("phase", ["start", "data", "forward", "evaluate", "checkpoint", "callbacks", "end"])
def test_a_stopped_rank_has_one_patience_in_every_phase(phase, nodes):
    """It writes no checkpoint and reads no sample, and the others wait for it, in the same phase perhaps."""
    detector = StandstillDetector(limits(), nodes)
    beats = {0: beat(99, phase, waits=True, activity="the other rank"), 1: beat(99, phase)}
    found, seconds = look_for(detector, beats, work(detector), 2000, stopped=[1])
    assert found and found.blocking_ranks == [1] and found.setting == "watch.patience"
    assert (
        60 <= seconds <= 62
        and f"rank 1 is stopped (by SIGSTOP, a terminal or a debugger) for {seconds - 1}" in str(found)
    )


def test_a_rank_that_is_stopped_before_it_has_begun_has_that_patience_too():
    detector = StandstillDetector(limits())
    beats = {0: beat(3, "start", step=0, waits=True, activity="the meeting of all ranks"), 1: None}
    found, seconds = look_for(detector, beats, 0.0, 700, stopped=[1])
    assert found and 60 <= seconds <= 62 and "rank 1 is stopped" in str(found)


def test_who_works_while_another_rank_is_stopped_may_go_on():
    """The stopped one may be continued before it is needed."""
    detector = StandstillDetector(limits())
    start = work(detector, ranks=3)
    beats = {0: beat(99, "data", sample=4), 1: beat(99, "data"), 2: beat(99, "backward", waits=True)}
    found, seconds = look_for(detector, beats, start, 300, stopped=[1])
    assert found and 125 <= seconds <= 127 and found.blocking_ranks == [1]


def test_a_rank_that_a_profiler_stops_for_an_instant_keeps_the_limit_of_its_phase():
    detector = StandstillDetector(limits())
    start = work(detector)
    beats = {0: beat(99, "forward", waits=True), 1: beat(99, "data")}
    for second in range(1, 125):
        assert detector.look(beats, start + second, [1] if second % 2 or second < 59 else []) is None
    found, seconds = look_for(detector, beats, start + 124, 10)
    assert found and 1 <= seconds <= 3 and found.setting == "loader.timeout"


def test_a_rank_that_never_began_or_does_not_end_is_named():
    late = StandstillDetector(limits(start="30 s"))
    found, seconds = look_for(
        late, {0: beat(3, "start", step=0, waits=True, activity="all"), 1: None}, 0.0, 60
    )
    assert found.blocking_ranks == [1] and "rank 1 has not begun for 30 s" in str(found) and seconds <= 32
    leaving = StandstillDetector(limits(sample_seconds=1.0))
    found, _ = look_for(leaving, {1: beat(99, "done")}, work(leaving), 100)
    assert "rank 1 is done, and its process has not ended for 60 s" in str(found)


def test_where_all_wait_the_earliest_exchange_is_told():
    detector = StandstillDetector(limits(sample_seconds=1.0))
    start = work(detector)
    beats = {0: beat(9, "update", waits=True, activity="b"), 1: beat(9, "backward", waits=True, activity="a")}
    found, _ = look_for(detector, beats, start, 100)
    assert found.blocking_ranks == [1]
    same = replace(found, beats={0: beats[1], 1: beats[1]})
    assert same.blocking_ranks == [0, 1] and "none of this node is late" in str(same)


def test_a_record_is_read_as_it_was_written_and_costs_next_to_nothing():
    board = StatusTable(3)
    try:
        own = Heartbeat()
        own.attach(board._memory, 1)
        assert board.read(1) is None
        own.step = 7
        own.enter("callbacks", "Ä" * 40)  # longer than there is room: cut, and whole letters only
        seen = board.read(1)
        assert seen and (seen.step, seen.phase, seen.activity, seen.count) == (7, "callbacks", "Ä" * 24, 1)
        with own.within("evaluate"):
            own.at(41)
            assert board.read(1).sample == 41 and board.read(1).phase == "evaluate"
            with own.waiting("all"):
                assert board.read(1).waits and board.read(1).activity == "all"
        assert (board.read(1).phase, board.read(1).waits) == ("callbacks", False)
        with pytest.raises(OSError, match="gone"), own.within("checkpoint"):
            raise OSError("gone")
        assert board.read(1).phase == "checkpoint"  # where it happened
        own.detach()
        own.enter("data")
        assert board.read(1).phase == "checkpoint"
        assert board.read(0) is None and board.read(2) is None
    finally:
        board.close()


@pytest.mark.processes
def test_a_record_is_never_seen_empty_while_it_is_written():
    """struct.pack_into fills its bytes with zeros first: a rank seemed not to have begun, and could be stopped so."""
    board = StatusTable(1)
    own = Heartbeat()
    board.give(own)
    own.enter("forward")
    if (writer := os.fork()) == 0:
        while True:
            own.enter("forward")
            own.at(4711)
    try:
        end, seen = time.monotonic() + 0.5, set()
        while time.monotonic() < end:
            seen.update(status and status.phase for status in (board.read(0) for _ in range(1000)))
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)
        board.close()
    assert seen == {"forward"}


@pytest.mark.parametrize(("nodes", "allowed"), [(1, 60), (2, 1800)])
def test_a_rank_that_waits_may_wait_for_a_callback_on_another_node(nodes, allowed):
    """The first rank may write a long report: its own node sees that, the other one sees ranks that wait."""
    detector = StandstillDetector(limits(sample_seconds=1.0), nodes)
    start = work(detector)
    beats = {
        rank: beat(99, "backward", waits=True, activity="the exchange of gradients") for rank in range(2)
    }
    found, seconds = look_for(detector, beats, start, 2000)
    assert found and allowed <= seconds <= allowed + 2


def test_a_rank_that_stands_by_itself_is_found_as_soon_on_two_nodes():
    detector = StandstillDetector(limits(sample_seconds=1.0), nodes=2)
    start = work(detector)
    found, seconds = look_for(detector, {0: beat(99), 1: beat(99, waits=True)}, start, 2000)
    assert found and found.blocking_ranks == [0] and 60 <= seconds <= 62


def test_ranks_that_wait_in_forward_and_behind_it_may_have_skipped_a_layer() -> None:
    """As a BatchNorm over all ranks in an expert that one rank does not use."""
    detector = StandstillDetector(limits())
    start = work(detector)
    everywhere = "an exchange between all ranks"
    beats = {0: beat(7, "exchange", waits=True), 1: beat(7, "forward", waits=True, activity=everywhere)}
    found, _ = look_for(detector, beats, start, 100)
    assert str(found).endswith("unless strategy.sync_batch_norm=false (docs/same.md).")
    alike = {0: beat(8, "forward", waits=True), 1: beat(8, "forward", waits=True)}
    found, _ = look_for(detector, alike, start + 200, 100)
    assert found and "sync_batch_norm" not in str(found)


RANK = """
import pdb, sys, time
from pathlib import Path
from paddle_dp.launch.command import Limits
from paddle_dp.launch.standstill import watched_inside
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration

limits = Limits(watch=WatchSettings(start=Duration.parse("1 s"), patience=Duration.parse("1 s")), sample_seconds=0.0)
with watched_inside(limits, Path(sys.argv[1]), lambda failure: print(failure.message, flush=True) or 124):
    heartbeat.enter("start")
    breakpoint()
    print("went on", flush=True)
    time.sleep(30)
"""


def test_a_prompt_is_seen_from_another_thread() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as commands, os.fdopen(write, "w") as keyboard:

        def work() -> None:
            pdb.Pdb(stdin=commands, stdout=io.StringIO()).set_trace()

        thread = threading.Thread(target=work)
        thread.start()
        eventually(lambda: in_debugger(thread.ident or 0), 10)
        assert not in_debugger(threading.get_ident())
        keyboard.write("continue\n")
        keyboard.flush()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.long
def test_a_rank_may_stand_at_a_breakpoint_and_nowhere_else(tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        time.sleep(4)
        assert rank.poll() is None  # four times its patience
        said, _ = rank.communicate("continue\n", timeout=20)
    assert rank.returncode == 124 and "went on" in said and "no rank has made progress" in said


ONLY_RANK = """
import os, signal, sys, threading
from dataclasses import replace
from pathlib import Path
from paddle_dp.launch import console, recipe_rank, start
from paddle_dp.launch.command import Job, Limits
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration

def work(*_):
    os.kill(os.getpid(), signal.SIGQUIT)
    print(Path(sys.argv[1], "stacks.rank-0").read_text())
    threading.Thread(target=threading.Event().wait).start()
    if sys.argv[2] == "fails":
        raise ValueError("a mistake of mine")

def show_end(result, plan):
    print(result.cause.message, flush=True)
    return result.cause.exit_status

recipe_rank.work, console.show_end = work, show_end
limits = Limits(watch=WatchSettings(patience=Duration.parse("1 s")), sample_seconds=0.0)
plan = replace(plan_of(Job(quiet=True, ends_process=True), Machine(cores=1)), limits=limits)
status = start._alone(plan, Path(sys.argv[1]))
heartbeat.enter("done")
sys.exit(status)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "status", "told"),
    [("works", 124, "rank 0 is done, and its process has not ended"), ("fails", 1, "a mistake of mine")],
)
def test_the_only_rank_ends_and_answers_as_others_do(
    tmp_path: Path, way: str, status: int, told: str
) -> None:
    """A callback's thread kept it for ever, after a failure, too; SIGQUIT ended it."""
    command = [sys.executable, "-c", ONLY_RANK, str(tmp_path), way]
    rank = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert rank.returncode == status and told in rank.stdout, rank.stderr
    assert " in work\n" in rank.stdout, "the stacks"
    assert ("no rank has made progress" in rank.stdout) == (way == "works"), (
        "a failure stays the last on the screen"
    )
