"""Whatever is ended, and whenever: ten seconds later no process of the job is left, and no file in /dev/shm."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import Started

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
TRAINING = {
    "recipe": "tests/faults/faulty.yaml",
    "overrides": [
        "train.length=100000 steps",
        "loader.num_workers=1",
        "callbacks=[{use: tests.faults.parts.Hang}, {use: metrics, every: 100 steps}, "
        "{use: checkpoint, every: 200 steps}]",
    ],
}
SHARED = Path("/dev/shm")
SECONDS = 10.0


def shared_by(pids: list[int]) -> set[Path]:
    """The files in /dev/shm that these processes have mapped or opened, or that bear their number."""
    found: set[Path] = set()
    for pid in pids:
        found.update(path for path in SHARED.iterdir() if re.search(rf"(?<!\d){pid}(?!\d)", path.name))
        with suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{pid}/maps").read_text()
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
            names = re.findall(r"(/dev/shm/\S+)", "\n".join([maps, *links]))
            found.update(map(Path, names))
    return found


def nothing_left(job: Started, shared: set[Path]) -> float:
    """Waits until no process and none of `shared` is left, and says how long that took; fails after ten seconds."""
    begun = time.monotonic()
    while (left := job.left()) or any(path.exists() for path in shared):
        files = [path.name for path in shared if path.exists()]
        assert time.monotonic() < begun + SECONDS, f"left: processes {left}, files {files}"
        time.sleep(0.05)
    return time.monotonic() - begun


def at_work(job: Started) -> list[int]:
    """The ranks, in a training with a data worker each."""
    pids = job.training_pids(2)
    assert all(psutil.Process(pid).children() for pid in pids), "no data worker"
    return pids


def starting(job: Started) -> list[int]:
    """No rank has been seen yet: the launcher has only begun."""
    while not (job.out / "logs" / "attempt-001" / "launcher.log").exists():
        assert job.process.poll() is None, job.process.communicate()
        time.sleep(0.01)
    return []


def kill(pid: int, number: int = signal.SIGKILL, times: int = 1) -> None:
    for each in range(times):
        time.sleep(0.5 * bool(each))
        with suppress(ProcessLookupError):
            os.kill(pid, number)


Deed = Callable[[Started, list[int]], None]
DEEDS: dict[str, tuple[Callable[[Started], list[int]], Deed, int, str]] = {
    "paddle-dp: kill -9, data workers running": (at_work, lambda job, _: kill(job.process.pid), -9, ""),
    "paddle-dp: kill -9 while it starts": (starting, lambda job, _: kill(job.process.pid), -9, ""),
    "paddle-dp: SIGHUP while it starts": (
        starting,
        lambda job, _: kill(job.process.pid, signal.SIGHUP),
        129,
        "ended by SIGHUP",
    ),
    "Ctrl-C twice, data workers running": (
        at_work,
        lambda job, _: kill(job.process.pid, signal.SIGINT, times=2),
        130,
        "ended by SIGINT",
    ),
    "Ctrl-C twice while it starts": (
        starting,
        lambda job, _: kill(job.process.pid, signal.SIGINT, times=2),
        130,
        "ended by SIGINT",
    ),
    "rank 1: kill -9, data workers running": (
        at_work,
        lambda _, pids: kill(pids[1]),
        137,
        "rank 1 of 2 on .* failed first: ended by SIGKILL",
    ),
    "Paddle's launcher: kill -9, data workers running": (
        at_work,
        lambda _, pids: kill(psutil.Process(pids[0]).ppid()),
        137,
        "Paddle's launcher .* was ended by SIGKILL",
    ),
    "rank 1's data worker: kill -9": (
        at_work,
        lambda _, pids: kill(psutil.Process(pids[1]).children()[0].pid),
        1,
        r"data worker 0 \(process \d+\), .*was killed \(SIGKILL",
    ),
}


@pytest.mark.parametrize("fault", DEEDS)
def test_nothing_is_left(start, found, fault):
    wait, deed, status, words = DEEDS[fault]
    job = start("train", **TRAINING, env={"FAULT": "callback-end 1 0"})
    pids = wait(job)
    shared = shared_by(job.left())
    begun = time.monotonic()
    deed(job, pids)
    ended, _, complained = job.finish(timeout=60)
    seconds = time.monotonic() - begun
    named = re.search(words, complained) is not None
    phase = "start" if wait is starting else "any"
    found(fault, seconds, named if words else None, phase=phase, job=job)
    assert nothing_left(job, shared) < SECONDS
    # All was over, and Python was about to leave: 130 for a shell.
    if "twice" in fault and ended == -signal.SIGINT:
        ended = 130
    # The first Ctrl-C asks, the second one may find that all have stopped.
    assert ended in ((status, 75) if "twice" in fault else (status,)) and (named or ended == 75), complained


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("segv", "rank 1 of 2 on .* failed first: ended by SIGSEGV"),
        ("raise", "cannot be imported: ValueError: the culprit's own words"),
        ("leave_3", "rank 1 of 2 on .* failed first: left with exit status 3"),
    ],
)
def test_nothing_is_left_of_a_job_that_fails_while_it_starts(start, found, deed, words):
    job = start("train", **TRAINING, env={"FAULT": f"import 1 0 {deed}"})
    seen: set[int] = set()
    while job.process.poll() is None:
        seen.update(job.left())
        time.sleep(0.1)
    status, _, complained = job.finish(timeout=60)
    named = re.search(words, complained) is not None
    found(f"rank 1 of 2: {deed} while it starts", job.seconds_from_fault(), named, phase="start", job=job)
    assert nothing_left(job, shared_by(sorted(seen))) < SECONDS
    assert status and named, complained


def test_what_paddles_own_loader_had_in_shared_memory_is_removed(start, found):
    """Its workers live on when their rank is killed, and hold a file for each batch that nobody has taken."""
    job = start("read_with_paddles_loader")
    pids = job.rank_pids(2)
    workers = [child.pid for pid in pids for child in psutil.Process(pid).children()]
    shared: set[Path] = set()
    for _ in range(100):  # a file lives for a moment, until its batch is taken
        shared |= shared_by([*pids, *workers])
        time.sleep(0.01)
    assert shared, "it has no file there: the test would see nothing"
    begun = time.monotonic()
    kill(pids[1])
    status, _, complained = job.finish(timeout=60)
    named = re.search("rank 1 of 2 on .* failed first: ended by SIGKILL", complained) is not None
    found("rank 1: kill -9, workers of Paddle's own loader", time.monotonic() - begun, named, phase="any")
    assert nothing_left(job, shared | shared_by([*pids, *workers])) < SECONDS
    assert status == 137 and named, complained
