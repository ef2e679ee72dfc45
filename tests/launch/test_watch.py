"""A launcher's children are known by their rank, and their ends by their codes."""

from __future__ import annotations

import os
import sys
import time

import pytest

from paddle_dp.launch.watch import Launcher, Watch

LAUNCHER = """
import os, subprocess, sys, time
for rank, code in enumerate(sys.argv[1:]):
    subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PADDLE_TRAINER_ID": str(rank)})
subprocess.Popen(["sleep", "60"])  # a child that is no rank
time.sleep(60)
"""


@pytest.fixture
def launch():
    started = []

    def start(*codes: str) -> Watch:
        env = {k: v for k, v in os.environ.items() if k != "PADDLE_TRAINER_ID"}
        started.append(Launcher([sys.executable, "-c", LAUNCHER, *codes], env=env, start_new_session=True))
        return Watch(started[0].ranks)

    yield start
    for process in started:
        os.killpg(process.pid, 9)
        process.wait()


def look_until(watch: Watch, condition) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        watch.look()
        time.sleep(0.01)
    assert condition(), (watch.pids, watch.departures)


def test_ranks_are_seen_to_come_and_go(launch):
    watch = launch("import time; time.sleep(60)", "exit(3)", "import os; os.kill(os.getpid(), 9)")
    look_until(watch, lambda: len(watch.departures) == 2)
    assert set(watch.pids) == {0, 1, 2}
    assert watch.living == [watch.pids[0]]
    assert {d.rank: d.code for d in watch.failed} == {1: 3, 2: -9}
    assert not watch.all_well(3)


def test_all_is_well_when_all_have_ended_with_0(launch):
    watch = launch("0", "0")
    look_until(watch, lambda: len(watch.departures) == 2)
    assert watch.all_well(2) and not watch.all_well(3)
    assert not watch.failed and not watch.living


def test_a_launcher_that_is_gone_has_no_ranks():
    with Launcher([sys.executable, "-c", ""]) as launcher:
        launcher.wait()
    watch = Watch(launcher.ranks)
    watch.look()
    assert watch.pids == {}


def test_who_waits_for_the_next_look_is_woken_by_an_end(launch):
    """The launcher looks every two seconds: an end that is seen after that has no code any more."""
    watch = launch("import time; time.sleep(60)", "import time; time.sleep(60)")
    look_until(watch, lambda: len(watch.pids) == 2)
    begun = time.monotonic()
    os.kill(watch.pids[1], 9)
    while not watch.departures and time.monotonic() < begun + 30:
        watch.rest(30.0)
        watch.look()
    assert watch.departures[1].code == -9 and time.monotonic() - begun < 10
    begun = time.monotonic()
    watch.rest(0.2)  # whose end is known wakes nobody
    assert time.monotonic() - begun > 0.15
    watch.close()
