"""A worker is nobody: it does not answer its parent's signals, dies with it, and writes nothing of its."""

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest

from paddle_dp.data import worker as worker_module
from paddle_dp.data.worker import Worker, WorkerEndedError, WorkerHungError, fork
from paddle_dp.kernel_kills import KernelKills
from tests.house.programs import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


def echo(commands, tell, progress):
    while word := commands.read(1):
        tell({"word": word.decode(), "pid": os.getpid()})


@pytest.mark.processes
def test_a_child_answers_until_it_is_ended():
    worker = Worker(echo)
    worker.send(b"ab")
    assert [worker.receive(10)["word"] for _ in range(2)] == ["a", "b"]
    worker.end()
    worker.end()
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.processes
def test_a_killed_child_that_the_kernel_holds_is_waited_for_later():
    """On a machine whose disk is busy it takes longer to end than `end` waits."""
    late = Worker(echo)
    with patch.object(late, "_await_end"):
        late.end()
    until(lambda: psutil.Process(late.pid).status() == psutil.STATUS_ZOMBIE)
    Worker(echo).end()
    assert not psutil.pid_exists(late.pid)


@pytest.mark.processes
def test_signals_to_the_parent_are_not_for_the_child():
    worker = Worker(echo)
    worker.send(b"a")
    worker.receive(10)
    os.kill(worker.pid, signal.SIGINT)
    worker.send(b"b")
    assert worker.receive(10)["word"] == "b"
    # A signal to the parent's group does not reach it.
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # as a scheduler: to all processes
        os.kill(worker.pid, number)
    worker.send(b"c")
    assert worker.receive(10)["word"] == "c"
    os.kill(worker.pid, signal.SIGSEGV)
    with pytest.raises(WorkerEndedError, match="ended by SIGSEGV"):
        worker.receive(10)
    worker.end()


@pytest.mark.processes
def test_files_that_are_read_have_a_position_of_the_childs_and_written_ones_the_parents(tmp_path):
    (tmp_path / "read").write_text("abcdef")

    def serve(commands, tell, progress):
        written.write("child\n")
        tell({"read": [file.read(3) for file in (read, both)]})

    with (
        (tmp_path / "read").open() as read,
        (tmp_path / "both").open("a+") as both,
        (tmp_path / "written").open("w", buffering=1) as written,
    ):
        read.seek(2)
        both.write("abcdef")
        both.seek(1)
        worker = Worker(serve)
        assert worker.receive(10) == {"read": ["cde", "bcd"]}
        worker.end()
        assert [file.read(3) for file in (read, both)] == ["cde", "bcd"]
        written.write("parent")
    assert (tmp_path / "written").read_text() == "child\nparent"


@pytest.mark.processes
def test_a_child_outlives_the_thread_that_made_it():
    """The signal of a parent's death is sent at the end of a thread: it must not be asked for there."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Worker(echo)))
    thread.start()
    thread.join()
    (worker,) = made
    time.sleep(0.05)
    worker.send(b"x")
    assert worker.receive(10)["word"] == "x"
    worker.end()


@pytest.mark.processes
def test_a_child_without_progress_counts_as_hung_and_one_with_progress_does_not():
    def slow(commands, tell, progress):
        commands.read(1)
        for _ in range(20):
            time.sleep(0.03)
            progress[0] += 1
        tell({})
        time.sleep(3600)

    worker = Worker(slow)
    worker.send(b"x")
    assert worker.receive(0.3) == {}
    with pytest.raises(WorkerHungError):
        worker.receive(0.3)
    worker.end()


def test_an_ended_child_takes_what_it_started_with_it():
    def starting(commands, tell, progress):
        tell({"pid": subprocess.Popen(["sleep", "3600"]).pid})
        commands.read(1)

    worker = Worker(starting)
    grandchild = psutil.Process(worker.receive(10)["pid"])
    worker.end()
    until(lambda: not _alive(grandchild))


@pytest.mark.processes
def test_an_end_of_the_commands_is_the_end_of_the_child():
    first, second = Worker(echo), Worker(echo)  # the second must not hold the first one's pipe open
    second.send(b"x")
    second.receive(10)
    os.close(first._commands)
    with pytest.raises(WorkerEndedError, match="exit status 0"):
        first.receive(10)
    null = os.open(os.devnull, os.O_RDONLY)
    if null != first._commands:  # a lower number may be free
        os.dup2(null, first._commands)
        os.close(null)
    first.end()
    second.end()


def test_whatever_fails_in_a_copy_ends_there(capfd):
    def fails():
        print("a word of its own")
        raise KeyError("lost")

    pid = fork(fails)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    out, err = capfd.readouterr()
    assert out == "a word of its own\n" and "KeyError: 'lost'" in err


PARENT = """
import os, sys, time
sys.path.insert(0, {root!r})
import numpy as np
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.worker_pool import Prefetched
class Slow(list):
    def __getitem__(self, index):
        time.sleep(3600 if index > 3 else 0)
        return np.zeros(1000), index
sys.stdout.write("not yet written ")
sampler = Sampler(64, 2, shuffle=False)
source = Prefetched(Slow(range(64)), sampler, 2, 4, 60.0)
reading = source.read(0, ((k, sampler) for k in range(sampler.batches)))
next(reading)
print(*[worker.pid for worker in source._pool._workers], flush=True)
sys.stdin.readline()
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(3600)", "raise SystemExit(3)"], ids=["killed", "leaves"])
def test_they_die_with_their_parent_and_leave_nothing(then):
    """Workers in the middle of a sample that never ends: neither a kill -9 nor an end of the parent is outlived."""
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(root=root, then=then)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        line = parent.stdout.readline()
        workers = [psutil.Process(int(pid)) for pid in line.replace("not yet written", "").split()]
        assert len(workers) == 2 and line.count("not yet written") == 1
        assert not any("/dev/shm" in Path(f"/proc/{worker.pid}/maps").read_text() for worker in workers)
        try:
            if "sleep" in then:
                parent.kill()
            else:
                print("leave", file=parent.stdin, flush=True)  # not before its workers were looked at
            parent.wait(10)
            until(lambda: not any(_alive(worker) for worker in workers))
        finally:
            for process in (parent, *filter(_alive, workers)):
                process.kill()
        assert parent.stdout.read() == ""  # what the parent had not yet written was not written again


def _alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.processes
def test_a_child_that_stops_within_a_reply_counts_as_hung_and_a_slow_one_does_not():
    """The rank read on without a limit, and hung as well."""

    def stops(commands, tell, progress):
        tell({"arrays": [np.arange(1 << 20)]})
        os.write(pipes[-1], struct.pack("<q", 20) + b"{}")
        time.sleep(3600)

    pipes, write = [], worker_module._write

    def slowly(pipe, content):
        pipes.append(pipe)
        for chunk in np.array_split(np.frombuffer(content, np.uint8), 8):
            time.sleep(0.1)
            write(pipe, chunk)

    with patch.object(worker_module, "_write", slowly):
        worker = Worker(stops)
    assert worker.receive(0.5)["arrays"][0].sum() == (1 << 20) * ((1 << 20) - 1) // 2
    with pytest.raises(WorkerHungError):
        worker.receive(0.3)
    worker.end()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("count", "killer"),
    [
        (4, "by the kernel: memory ran out"),
        (3, "by a person or another program"),
        (None, "is the machine out of"),
    ],
)
def test_the_killer_of_a_child_is_named_by_the_kernel_s_count(tmp_path, count, killer):
    (tmp_path / "proc").mkdir()
    vmstat = tmp_path / "proc/vmstat"
    vmstat.write_text("oom_kill 3\n" if count else "nr_free_pages 1\n")
    with patch.object(worker_module, "KernelKills", lambda: KernelKills(tmp_path)):
        worker = Worker(echo)
    os.kill(worker.pid, signal.SIGKILL)
    if count:
        vmstat.write_text(f"oom_kill {count}\n")
    with pytest.raises(WorkerEndedError, match=rf"was killed \(SIGKILL.*{killer}"):
        worker.receive(10)
    worker.end()


@pytest.mark.processes
def test_a_bus_error_of_a_child_points_at_a_file_that_was_cut_short():
    worker = Worker(echo)
    worker.send(b"a")
    assert worker.receive(10)["word"] == "a"  # it has the handlers of a worker
    os.kill(worker.pid, signal.SIGBUS)
    with pytest.raises(WorkerEndedError, match="SIGBUS, often a file that was cut short"):
        worker.receive(10)
    worker.end()
