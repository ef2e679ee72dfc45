"""A rank that stands still, anywhere: noticed in time, named with its phase, and nobody is left."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

RECIPE = "tests/faults/faulty.yaml"  # its patience is 3 s
SLACK = 5.0  # seconds beyond the patience: for looking, for the stacks, for a machine with other things to do

# Where rank 1 of 2 stands still, and what the screen says of it.
PLACES = {
    "data": r"rank 1 has been in data of step \d+ \(sample \d+\) for \d+ s; rank 0 waits in exchange",
    "forward": r"rank 1 has been in forward of step 7 for \d+ s; rank 0 waits in exchange of step 7 \(the exchange of",
    "exchange": r"rank 1 has been in exchange of step 7",
    "update": r"rank 1 has been in update of step 7 for \d+ s; rank 0 waits in exchange of step 8",
    "evaluate": r"rank 1 has been in evaluate after step 4 \(sample \d+\) for \d+ s; rank 0 waits in evaluate",
    "checkpoint": r"rank 1 has been in checkpoint after step 4 for \d+ s; rank 0 waits in checkpoint after step 4",
    "callback-start": r"rank 1 has been in callbacks after step 0 \(Hanging.start\)",
    "callback-step": r"rank 1 has been in callbacks after step 6 \(Hanging.step\) for \d+ s; rank 0 waits in exchange",
    "callback-epoch": r"rank 1 has been in callbacks after step 4 \(Hanging.epoch\) for \d+ s; rank 0 waits in eval",
    "callback-end": r"rank 1 has been in callbacks after step 16 \(Hanging.end\)",
    "atexit": r"rank 1 is done, and its process has not ended",
    "thread": r"rank 1 is done, and its process has not ended",
}
# A fault, the words of FAULT, more settings, and what the screen says, with the function on top of the stack.
ROWS = [
    *((f"stands still: {place}", f"{place} 1 6", [], said, "stand_still") for place, said in PLACES.items()),
    (
        "never joins", "import 1 0", ["watch.start=15 s"],
        r"rank 1 has been in start \(reading the recipe\) for 1\d s; rank 0 waits in start", "stand_still",
    ),
    (  # No thread of its Python runs any more: its stack is written by the signal's handler, in C.
        "stands still in C code that keeps the interpreter", "forward 1 6 hold_gil", [],
        r"rank 1 has been in forward of step 7 for \d+ s; rank 0 waits in exchange", "_hold_the_interpreter",
    ),
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("fault", "deed", "overrides", "said", "function"),
    [
        pytest.param(*row, marks=() if row[1] == "forward 1 6" else pytest.mark.long, id=row[1])
        for row in ROWS
    ],
)
def test_rank_1_stands_still(launch, found, fault, deed, overrides, said, function):
    job = launch("train", recipe=RECIPE, overrides=overrides, env={"FAULT": deed})
    status, _, complained = job.finish(timeout=110)
    assert status == 124, complained
    named = re.search(said, complained) is not None
    seconds, allowed = map(
        float, re.search(r"progress for (\d+) s \(allowed are (\d+) s", complained).groups()
    )
    phase = deed.split()[0].partition("-")[0].replace("import", "start")
    found(f"rank 1 of 2 {fault} (patience {allowed:.0f} s)", seconds, named, phase=phase, job=job)
    assert named and f"in {function}" in complained and "parts.py" in complained, complained
    assert seconds <= allowed + SLACK and not job.left()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_rank_that_alone_stops_the_training_is_named_with_the_call(launch):
    job = launch("train", recipe=RECIPE, overrides=["callbacks=[{use: tests.faults.parts.StopsAlone}]"])
    status, _, complained = job.finish(timeout=110)
    named = "rank 1 waits in end after step 2 ('trainer.stop on every rank')" in complained
    assert status == 124 and named and not job.left(), complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_data_worker_that_hangs_is_named_with_its_sample(start, cause_named):
    """By the loader, which has the first word; the watch would have come 5 s later."""
    overrides = ["loader.num_workers=2", "loader.timeout=3 s"]
    job = start("train", recipe=RECIPE, overrides=overrides, env={"FAULT": "data 1 6"})
    pattern = r"data worker \d .*sample \d+.* stood still for 3 s(.|\n)*rank 1 of 2"
    cause_named(job, "rank 1 of 2: a data worker stands still (patience 3 s)", 1, pattern, "data")


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_stopped_rank_is_named(start, found):
    job = start("train", recipe=RECIPE, overrides=["train.length=100000 steps", "callbacks=[]"])
    pids = job.training_pids(2)
    os.kill(pids[1], signal.SIGSTOP)
    begun = time.monotonic()
    status, _, complained = job.finish(timeout=60)
    seconds = time.monotonic() - begun
    named = "rank 1 is stopped (by SIGSTOP" in complained and "rank 0 waits in" in complained
    found("rank 1 of 2 is stopped by SIGSTOP (patience 3 s)", seconds, named, phase="any", job=job)
    assert status == 124 and named and seconds < 3 + SLACK and not job.left(), complained


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["forward", pytest.param("callback-end", marks=pytest.mark.long)])
def test_one_rank_alone_stands_still(fork, found, where):
    """It has no supervisor: a thread of its own watches, and the same words are said."""
    job = fork(
        "train", ranks=1, recipe=RECIPE, overrides=["loader.num_workers=1"], env={"FAULT": f"{where} 0 6"}
    )
    status, said, complained = job.finish(timeout=110)
    seconds = job.seconds_from_fault(said)
    words = rf"rank 0 has been in {where[:8]}.* for \d+ s\.\nthe innermost call first"
    named = re.search(words, complained) is not None
    found(f"1 rank stands still: {where} (patience 3 s)", seconds, named, phase=where, job=job)
    assert status == 124 and named and "in stand_still" in complained, complained
    assert seconds < 3 + SLACK and job.gone_within(2.0)
