"""A launcher's children are known by their rank, and their ends by their codes."""

from __future__ import annotations

import os
import sys
import time

import psutil
import pytest

from paddle_dp.launch.processes import exit_of
from paddle_dp.launch.rank_monitor import Launcher, RankMonitor
from tests.eventually import eventually

LAUNCHER = """
import os, subprocess, sys, time
# As Paddle's launcher it keeps its children: Popen waits for an ended one that nobody keeps, and its code is lost.
children = [subprocess.Popen(["sleep", "60"])]  # no rank
for rank, code in enumerate(sys.argv[1:]):
    env = {**os.environ, "PADDLE_TRAINER_ID": str(rank)}
    children.append(subprocess.Popen([sys.executable, "-c", code], env=env))
children.append(subprocess.Popen(["sleep", "60"]))
time.sleep(60)
"""


@pytest.fixture
def launch():
    started = []

    def start(*codes: str) -> Launcher:
        env = {k: v for k, v in os.environ.items() if k != "PADDLE_TRAINER_ID"}
        started.append(Launcher([sys.executable, "-c", LAUNCHER, *codes], env=env, start_new_session=True))
        started[-1].expected = range(len(codes))
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def look_until(monitor: RankMonitor, condition) -> None:
    eventually(lambda: monitor.look() or condition(), 30)


def test_ranks_are_seen_to_come_and_go(launch):
    codes = "import time; time.sleep(60)", "exit(3)", "import os; os.kill(os.getpid(), 9)"
    monitor = RankMonitor(launch(*codes).ranks)
    look_until(monitor, lambda: len(monitor.departures) == 2)
    assert set(monitor.pids) == {0, 1, 2}
    assert monitor.living == [monitor.pids[0]]
    assert {d.rank: d.code for d in monitor.failed} == {1: 3, 2: -9}
    assert not monitor.all_well(3)


@pytest.mark.parametrize("alive", [0, 1, 2, 3])
def test_ranks_that_end_before_anybody_has_looked_are_seen(launch, alive):
    codes = [f"exit({rank + 3})" for rank in range(3)]
    codes[alive : alive + 1] = ["import time; time.sleep(60)"] if alive < 3 else []
    launcher = launch(*codes)
    monitor, children = RankMonitor(launcher.ranks), psutil.Process(launcher.pid).children
    ended = 3 - (alive < 3)
    eventually(lambda: sum(child.status() == psutil.STATUS_ZOMBIE for child in children()) == ended, 30)
    look_until(monitor, lambda: len(monitor.pids) == 3)
    assert {d.rank: d.code for d in monitor.failed} == {rank: rank + 3 for rank in range(3) if rank != alive}


def test_all_is_well_when_all_have_ended_with_0(launch):
    monitor = RankMonitor(launch("0", "0").ranks)
    look_until(monitor, lambda: len(monitor.departures) == 2)
    assert monitor.all_well(2) and not monitor.all_well(3)
    assert not monitor.failed and not monitor.living


def test_a_launcher_that_is_gone_has_no_ranks():
    with Launcher([sys.executable, "-c", ""]) as launcher:
        launcher.wait()
    monitor = RankMonitor(launcher.ranks)
    monitor.look()
    assert monitor.pids == {}


def test_who_waits_for_the_next_look_is_woken_by_an_end(launch):
    """The launcher looks every two seconds: an end that is seen after that has no code any more."""
    monitor = RankMonitor(launch("import time; time.sleep(60)", "import time; time.sleep(60)").ranks)
    look_until(monitor, lambda: len(monitor.pids) == 2)
    begun = time.monotonic()
    os.kill(monitor.pids[1], 9)
    while not monitor.departures and time.monotonic() < begun + 30:
        monitor.rest(30.0)
        monitor.look()
    assert monitor.departures[1].code == -9 and time.monotonic() - begun < 10
    begun = time.monotonic()
    monitor.rest(0.2)  # whose end is known wakes nobody
    assert time.monotonic() - begun > 0.15
    monitor.close()


def test_what_the_launcher_starts_for_the_nodes_meeting_is_no_rank(tmp_path):
    """It ended before the rank had begun, and counted as a rank that left: two nodes failed to start, now and then."""
    meeting = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '']); time.sleep(60)"
    launcher = Launcher([sys.executable, "-c", meeting], start_new_session=True)
    launcher.expected, launcher.first_log = [0], tmp_path / "workerlog.0"
    try:
        end = time.monotonic() + 20
        while not [pid for pid in launcher._children() if exit_of(pid)[0]]:
            assert launcher.ranks() == {} and time.monotonic() < end
            time.sleep(0.01)
        assert launcher.ranks() == {}
        launcher.first_log.touch()
        assert launcher.ranks() == {}
    finally:
        launcher.kill()
        launcher.wait()
