"""Whatever ends one rank of a training, in any layout: that rank is named, with how it ended, and nobody is left."""

from __future__ import annotations

import os
import random
import re
import signal
import time

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
    "raise": (1, r"ValueError: the culprit's own words\nrank 1 of \d on \S+ failed first\n"),
    "kill": (137, r"rank 1 of \d on \S+ failed first: ended by SIGKILL"),
    "segv": (139, r"rank 1 of \d on \S+ failed first: ended by SIGSEGV"),
    "abort": (134, r"rank 1 of \d on \S+ failed first: ended by SIGABRT"),
    "exit_0": (
        1,
        r"sys.exit\(0\) at \S+parts.py:\d+ ended this rank after step 6, .*\nrank 1 of \d on \S+ failed first",
    ),
    "exit_3": (3, r"SystemExit: 3\nrank 1 of \d on \S+ failed first"),
    "leave_0": (1, r"rank 1 of \d on \S+ failed first: left with exit status 0 while the job was running"),
    "leave_5": (5, r"rank 1 of \d on \S+ failed first: left with exit status 5 while the job was running"),
}
QUICK = [("pipeline 2", "leave_0")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "deed"),
    [
        (layout, deed) if (layout, deed) in QUICK else pytest.param(layout, deed, marks=pytest.mark.long)
        for layout in LAYOUTS
        for deed in (DEEDS if layout in ("data 2", "pipeline 2") else ("raise", "kill", "leave_0"))
    ],
)
def test_the_rank_that_failed_first_is_named(start, found, layout, deed):
    status, words = DEEDS[deed]
    job = start("train", recipe=RECIPE, overrides=LAYOUTS[layout], env={"FAULT": f"forward 1 6 {deed}"})
    ended, _, complained = job.finish(timeout=110)
    named = re.search(words, complained) is not None
    found(f"rank 1, {layout}: {deed}", job.seconds_from_fault(), named, phase="forward", job=job)
    assert named and ended == status and not job.left(), complained


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("deed", "status", "words"),
    [
        (
            "raise",
            1,
            r"sample \d+: ValueError: the culprit's own words\nrank 0 of 2 on \S+ failed first",
        ),
        ("kill", 137, r"rank 0 of 2 on \S+ failed first: ended by SIGKILL"),
    ],
)
def test_the_rank_that_reads_for_all_is_named(start, found, deed, status, words):
    """The others wait for its samples."""
    overrides = [*LAYOUTS["scattered 2"], "train.length=60 steps"]
    job = start("train", recipe=RECIPE, overrides=overrides, env={"FAULT": f"data 0 0 {deed}"})
    ended, _, complained = job.finish(timeout=110)
    named = re.search(words, complained) is not None
    found(f"rank 0, which reads for all: {deed}", job.seconds_from_fault(), named, phase="data", job=job)
    assert named and ended == status and not job.left(), complained


# Where rank 0 is killed: its phase, and the words of FAULT. At step 6, or at the checkpoint or evaluation after it.
PHASES = {
    "data": "data", "exchange": "exchange", "update": "update", "evaluate": "evaluate", "callbacks": "callback-step",
    "checkpoint, before it writes": "checkpoint", "checkpoint, half a file written": "writing",
    "checkpoint, written and not yet in place": "renaming", "callbacks, after the last update": "callback-end",
    "end": "atexit",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("phase", PHASES)
def test_the_main_rank_is_killed_in_any_phase(start, found, phase):
    job = start("train", recipe=RECIPE, env={"FAULT": f"{PHASES[phase]} 0 6 kill"})
    status, _, complained = job.finish(timeout=110)
    named = re.search("rank 0 of 2 on .* failed first: ended by SIGKILL", complained) is not None
    word = phase.partition(",")[0]
    found(f"rank 0, data 2: kill in {phase}", job.seconds_from_fault(), named, phase=word, job=job)
    assert named and status == 137 and not job.left(), complained


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
def test_memory_that_cannot_be_had_is_named(start, found):
    job = start("train", recipe=RECIPE, env={"FAULT": "forward 1 6 memory"})
    status, _, complained = job.finish(timeout=110)
    named = re.search(r"Unable to allocate .*\nrank 1 of 2 on .* failed first", complained) is not None
    found(
        "rank 1, data 2: memory that cannot be had", job.seconds_from_fault(), named, phase="forward", job=job
    )
    assert named and status == 1 and not job.left(), complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_training_that_all_ranks_leave_with_0_is_not_done(start, found):
    jobs = [
        start("train", recipe=RECIPE, env={"FAULT": f"forward all 6 {deed}"})
        for deed in ("exit_0", "leave_0")
    ]
    for job, words in zip(
        jobs, (r"sys.exit\(0\) at \S+parts.py", "left with exit status 0 while"), strict=True
    ):
        status, _, complained = job.finish(timeout=110)
        named = re.search(words, complained) is not None
        found(
            f"both ranks: {'sys.exit' if 'sys' in words else 'os._exit'}(0)",
            job.seconds_from_fault(),
            named,
            phase="forward",
            job=job,
        )
        assert status == 1 and named, complained


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
