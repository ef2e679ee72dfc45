"""Whatever ends one rank of a training, in any layout: that rank is named, with how it ended, and nobody is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from paddle_dp.mesh.heartbeat import PHASES as ALL_PHASES

RECIPE = "tests/faults/faulty.yaml"
GPT = [
    "model={use: gpt, vocab: 32, width: 32, depth: 2, heads: 2, length: 16}",
    "dataset={use: random_tokens, vocab: 32, length: 16, samples: 200, test_samples: 8}",
]
LAYOUTS = {
    "data 2": [],
    "pipeline 2": ["strategy={use: hybrid, pipeline: 2}", "train.micro_batches=2"],
    "tensor 2": [*GPT, "strategy={use: hybrid, tensor: 2}"],
    "sharding 2": [*GPT, "strategy={use: hybrid, sharding: 2, sharding_stage: 3}"],
    "sequence 2": [*GPT, "strategy={use: hybrid, sequence: 2}"],
    "scattered 2": ["dataset.reading=scatter"],
    "branches 2": [
        "model={use: tests.strategies.test_branches.Deep}",
        "strategy={use: branches, over: 2, sync_batch_norm: true}",
    ],
}
# What rank 1 does in the forward of step 7, the status that the job ends with, and what the screen says.
DEEDS = {
    "raise": (1, r"ValueError: the culprit's own words\n(.* frames .*\n)?rank 1 of \d on \S+ failed first\n"),
    "kill": (137, r"rank 1 of \d on \S+ failed first: ended by SIGKILL"),
    "segv": (139, r"rank 1 of \d on \S+ failed first: ended by SIGSEGV"),
    "abort": (134, r"rank 1 of \d on \S+ failed first: ended by SIGABRT"),
    "exit_0": (
        1,
        r"sys.exit\(0\) at \S+parts.py:\d+ ended this rank after step 6, .*\nrank 1 of \d on \S+ failed first",
    ),
    "exit_3": (3, r"SystemExit: 3\n(?:\(\d+ frames .*\n)?rank 1 of \d on \S+ failed first"),
    "leave_0": (1, r"rank 1 of \d on \S+ failed first: left with exit status 0 while the job was running"),
    "leave_5": (5, r"rank 1 of \d on \S+ failed first: left with exit status 5 while the job was running"),
}
QUICK = "rank 1, pipeline 2: leave_0"
# Where rank 0 is killed: its phase, and the words of FAULT. At step 6, or at the checkpoint or evaluation after it.
PHASES = {
    "data": "data", "exchange": "exchange", "update": "update", "evaluate": "evaluate", "callbacks": "callback-step",
    "checkpoint, before it writes": "checkpoint", "checkpoint, half a file written": "writing",
    "checkpoint, written and not yet in place": "renaming", "callbacks, after the last update": "callback-end",
    "end": "atexit",
}  # fmt: skip


def row(
    fault: str, deed: str, status: int, pattern: str, phase: str = "forward", overrides: Sequence[str] = ()
) -> Any:
    """What a fault is called, the words of FAULT, how the job ends, and what the screen says."""
    marks = () if fault == QUICK else pytest.mark.long
    return pytest.param(fault, deed, status, pattern, phase, overrides, marks=marks, id=fault)


READER = [
    *LAYOUTS["scattered 2"],
    "train.length=60 steps",
]  # rank 0 reads for all: the others wait for its samples
BY_KILL = "ended by SIGKILL"
ROWS = [
    *(
        row(f"rank 1, {layout}: {deed}", f"forward 1 6 {deed}", *DEEDS[deed], overrides=overrides)
        for layout, overrides in LAYOUTS.items()
        for deed in (DEEDS if layout in ("data 2", "pipeline 2") else ("raise", "kill", "leave_0"))
    ),
    *(
        row(f"rank 0, which reads for all: {deed}", f"data 0 0 {deed}", status, pattern, "data", READER)
        for deed, status, pattern in (
            ("raise", 1, r"sample \d+: ValueError: the culprit's own words\nrank 0 of 2 on \S+ failed first"),
            ("kill", 137, rf"rank 0 of 2 on \S+ failed first: {BY_KILL}"),
        )
    ),
    *(
        row(
            f"rank 0, data 2: kill in {phase}", f"{place} 0 6 kill", 137,
            f"rank 0 of 2 on .* failed first: {BY_KILL}", phase.partition(",")[0],
        )
        for phase, place in PHASES.items()
    ),
    row(
        "rank 1, data 2: memory that cannot be had", "forward 1 6 memory", 1,
        r"out of memory: .* in forward of step 7(.|\n)*\nrank 1 of 2 on .* failed first",
    ),
    row("both ranks: sys.exit(0)", "forward all 6 exit_0", 1, r"sys.exit\(0\) at \S+parts.py"),
    row("both ranks: os._exit(0)", "forward all 6 leave_0", 1, "left with exit status 0 while"),
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("fault", "deed", "status", "pattern", "phase", "overrides"), ROWS)
def test_the_first_cause_is_named(request, cause_named, fault, deed, status, pattern, phase, overrides):
    start = request.getfixturevalue("fork" if fault == QUICK else "start")
    job = start("train", recipe=RECIPE, overrides=overrides, env={"FAULT": deed})
    cause_named(job, fault, status, pattern, phase)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group below our own, with a limit of 600 MB."""
    words = dict(
        line.split(":", 1)[1].rsplit(":", 1) for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    top = Path("/sys/fs/cgroup")
    one = top / "memory" / words["memory"].lstrip("/") if "memory" in words else top / words[""].lstrip("/")
    made = one / f"paddle_dp-{os.getpid()}"
    limit = made / ("memory.limit_in_bytes" if "memory" in words else "memory.max")
    try:
        made.mkdir()
        limit.write_text(str(600 << 20))
    except OSError as error:
        if made.exists():
            made.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield made
    made.rmdir()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_rank_that_the_kernel_ends_is_told_so(start, cause_named, group):
    job = start("take_all_memory", extra={"group": str(group)})
    pattern = f"rank 1 of 2 on .* failed first: {BY_KILL}, by the kernel: memory ran out"
    cause_named(job, "rank 1: out of memory, ended by the kernel", 137, pattern, measured=False)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGHUP])
def test_a_launcher_that_sleeps_or_is_told_to_hang_up(start, found, number):
    """Stopped, it is missed by nobody, and the training ends well; by SIGHUP it is ended as by any signal."""
    overrides = ["train.length=2000 steps", "callbacks=[{use: checkpoint, every: 500 steps}]"]
    job = start("train", recipe=RECIPE, overrides=overrides)
    pids = job.training_pids(2)
    launcher, begun = psutil.Process(pids[0]).ppid(), time.monotonic()
    os.kill(launcher, number)
    status, _, complained = job.finish(timeout=100)
    seconds = time.monotonic() - begun
    if number == signal.SIGSTOP:
        found(
            "Paddle's launcher: SIGSTOP: the training ends well", seconds, status == 0, phase="any", job=job
        )
        assert (status, complained) == (0, "")
    else:
        named = f"Paddle's launcher (process {launcher}) was ended by SIGHUP" in complained
        found("Paddle's launcher: SIGHUP", seconds, named, phase="any", job=job)
        assert named and status == 129, complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_the_launcher_that_was_killed_is_named_and_not_a_rank(start, found):
    job = start("train", recipe=RECIPE, overrides=["train.length=100000 steps", "callbacks=[]"])
    pids = job.training_pids(2)
    launcher = psutil.Process(pids[0]).ppid()
    begun = time.monotonic()
    os.kill(launcher, signal.SIGKILL)
    status, _, complained = job.finish(timeout=60)
    named = f"Paddle's launcher (process {launcher}) was ended by SIGKILL" in complained
    found("Paddle's launcher: kill -9", time.monotonic() - begun, named, phase="any", job=job)
    assert status == 137 and named and "failed first" not in complained and not job.left(), complained


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("number", "times"), [(signal.SIGKILL, 20), (signal.SIGSTOP, 20)])
def test_on_four_hybrid_ranks_the_right_one_is_named_at_any_moment(start, found, number, times):
    draw, wrong, took = random.Random(7), [], []
    for _ in range(times):
        job = start("train", ranks=4, recipe="tests/faults/hybrid.yaml")
        pids, rank = job.training_pids(4), draw.randrange(4)
        time.sleep(draw.random())
        begun = time.monotonic()
        os.kill(pids[rank], number)
        _, _, complained = job.finish(timeout=60)
        took.append(time.monotonic() - begun)
        said = r"of 4 on \S+ failed first: ended by SIGKILL in"
        if number == signal.SIGSTOP:
            said = r"is stopped \(by SIGSTOP[^)]*\) for \d+ s, in"
        if not re.search(rf"rank {rank} {said} ({'|'.join(ALL_PHASES)})\b", complained) or job.left():
            wrong.append(f"rank {rank}: {complained}")
    found(f"4 hybrid ranks, {times} times: {number.name}", max(took), not wrong, phase="any", job=job)
    assert not wrong, f"{len(wrong)} of {times}:\n" + "\n".join(wrong)
