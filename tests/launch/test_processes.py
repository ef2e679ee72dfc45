"""Families of processes are seen as they are, and end by order; signals to this process are recorded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from paddle_dp.errors import EndedError, StoppedError
from paddle_dp.launch import console, processes, recipe_rank, start
from paddle_dp.launch.command import Job
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.processes import (
    alive,
    descendants,
    exit_of,
    kill_all,
    marked,
    recorded_signals,
    remove_shared_memory,
    tied_to,
    variable,
)
from paddle_dp.launch.scratch import scratch_folder
from tests.eventually import eventually

PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(60)"
)


@pytest.fixture
def family():
    """A process and its child, which has a session of its own."""
    mark = {**os.environ, "TEST_MARK": f"{os.getpid()}-{time.time_ns()}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=mark)
    child = int(parent.stdout.readline())
    yield parent, child, mark["TEST_MARK"]
    kill_all(lambda: [pid for pid in (parent.pid, child) if alive(pid)])
    parent.wait()
    parent.stdout.close()


def test_descendants_are_found_in_any_session(family):
    parent, child, _ = family
    assert descendants(parent.pid) == [child]
    assert {parent.pid, child} <= set(descendants(os.getpid()))


def test_orphans_are_found_by_their_mark(family):
    parent, child, mark = family
    parent.kill()
    parent.wait()
    assert alive(child)
    assert marked("TEST_MARK", mark) == [child]
    assert variable(child, "TEST_MARK") == mark
    kill_all(lambda: marked("TEST_MARK", mark))
    assert not alive(child)


def test_a_killed_process_is_awaited_while_it_frees_its_memory():
    """It has no mark then; a job was over, or began again, while a rank still held its memory."""
    program = "content = b'1' * 600_000_000; print(flush=True); input()"
    environment = {**os.environ, "TEST_MARK": f"{os.getpid()}-{time.time_ns()}"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        process.stdout.readline()
        kill_all(lambda: marked("TEST_MARK", environment["TEST_MARK"]))
        assert not alive(process.pid)


def test_a_process_that_has_just_begun_is_found_by_its_mark():
    """Popen returns while the child still replaces its program, and its environment is empty: every second time."""
    environment = {**os.environ, "TEST_MARK": "begun"}
    for _ in range(40):
        process = subprocess.Popen(["sleep", "60"], env=environment)
        try:
            assert variable(process.pid, "TEST_MARK") == "begun"
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("code", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9), ("0", 0)]
)
def test_an_exit_code_is_seen_before_the_parent_asks(code, status):
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        eventually(lambda: exit_of(process.pid) == (True, status))
        assert not alive(process.pid)
    finally:
        process.wait()
    assert exit_of(process.pid) == (True, None)


def test_a_running_process_has_no_exit():
    assert exit_of(os.getpid()) == (False, None)
    assert variable(os.getpid(), "NO_SUCH_VARIABLE") is None


def test_what_is_tied_dies_with_its_parent():
    code = (
        "import os, subprocess, sys, time\n"
        "from paddle_dp.launch.processes import tied_to\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=tied_to(os.getpid()))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not alive(child), 2.0)


def test_what_lost_its_parent_before_it_was_tied_does_not_start():
    process = subprocess.Popen(["sleep", "60"], preexec_fn=tied_to(1))  # noqa: PLW1509 - the point of it
    assert process.wait(timeout=5) == 1


def test_shared_memory_of_some_processes_is_removed_and_no_other(tmp_path):
    names = ("paddle_71_0_123", "paddle_71_1_456", "paddle_7_0_1", "paddle_710_0_1", "sem.71", "psm_71")
    for name in names:
        (tmp_path / name).touch()
    remove_shared_memory([71, 4711], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names[2:])
    remove_shared_memory([71], tmp_path / "none")


@pytest.fixture(autouse=True)
def heeded():
    """A shell's background job, and nohup, have signals ignored from birth, which `recorded_signals` respects."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_noted_and_counted(number, monkeypatch):
    """A person's second Ctrl-C counts; the repeat of another signal by an engine does not, but for a later one."""
    before = signal.getsignal(number)
    with recorded_signals() as told:
        assert (told.number, told.name) == (0, "")
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        requests = 2 if number == signal.SIGINT else 1
        assert (told.number, told.times, told.name) == (number, requests, signal.Signals(number).name)
        monkeypatch.setattr(processes, "REPEATED", 0.0)
        os.kill(os.getpid(), number)
        assert (told.number, told.times) == (number, requests + 1)
    assert signal.getsignal(number) is before


@pytest.fixture
def end_signals():
    """END_SIGNALS, which end the test."""

    def end(number, frame):
        raise EndedError(number)

    before = {number: signal.signal(number, end) for number in processes.END_SIGNALS}
    yield list(before)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_after_the_job_replaces_no_status(end_signals):
    """A node that had stopped with 75 was ended by its own SIGTERM while Python closed: ssh.sh, and Slurm, saw 143."""
    with recorded_signals(ends_process=True):
        pass
    for number in end_signals:
        os.kill(os.getpid(), number)


def test_nor_does_one_after_a_job_with_checkpoints_in_memory(end_signals, tmp_path):
    """The end of their folder brought back the handlers of before the job."""
    with scratch_folder("paddle-dp-test-", tmp_path), recorded_signals(ends_process=True):
        pass
    for number in end_signals:
        os.kill(os.getpid(), number)


def test_nor_does_one_after_a_job_of_one_rank(end_signals, tmp_path, monkeypatch):
    """Such a job runs in the process of `paddle-dp`, which ended with 143 in place of 75."""

    def work(*_):
        raise StoppedError("stopped by SIGTERM after step 3 of 9: the training is not done.")

    def show_end(result, plan):
        for number in end_signals:
            os.kill(os.getpid(), number)
        return result.status

    monkeypatch.setattr(recipe_rank, "work", work)
    monkeypatch.setattr(console, "show_end", show_end)
    plan = plan_of(Job(quiet=True, ends_process=True), Machine(cores=1))
    assert start._alone(plan, tmp_path) == 75


def test_the_first_signal_counts():
    with recorded_signals() as told:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert told.number == signal.SIGTERM


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with recorded_signals() as told:
            os.kill(os.getpid(), signal.SIGHUP)
        assert told.number == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_nothing():
    def wait():
        with recorded_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
