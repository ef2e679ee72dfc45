"""A training that is asked to stop: all ranks stop after one update, write one checkpoint, and leave with 75."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import psutil
import pytest

RECIPE = "tests/faults/faulty.yaml"
LONG = [
    "train.length=100000 steps",
    "callbacks=[{use: metrics, every: 100 steps}, {use: checkpoint, every: null}]",
]
SOON = 20.0  # seconds: an agreement every 2 s where the machine is idle, and a checkpoint


def stopped(job, begun: float) -> tuple[float, int, str]:
    """How long it took, at which step it stopped, and all that the screen said; after looking at what was left."""
    status, _, complained = job.finish(timeout=60)
    seconds = time.monotonic() - begun
    assert status == 75 and not job.left(), f"{status}: {complained}"
    step = int(
        re.search(r"stopped by .* after step (\d+) of 100000: the training is not done\.", complained)[1]
    )
    assert complained.count("stopped by") == 1, complained
    assert [path.name for path in job.out.glob("checkpoints/step-*")] == [f"step-{step:08d}"]
    assert re.search(rf"^go on from step {step}: paddle-dp train ", complained, re.MULTILINE), complained
    last = json.loads((job.out / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["kind"], last["step"]) == ("failed", "StoppedError", step)
    return seconds, step, complained


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("number", "ranks", "whom"),
    [
        (signal.SIGTERM, 2, "supervisor"),
        pytest.param(signal.SIGINT, 2, "supervisor", marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 2, "supervisor", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 2, "supervisor", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 2, "rank 1", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, "rank 1", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 2, "all processes", marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, 2, "all processes", marks=pytest.mark.long),
        # By default in the test of a second job below.
        pytest.param(signal.SIGTERM, 1, "supervisor", marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 1, "supervisor", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 1, "supervisor", marks=pytest.mark.long),
    ],
)
def test_a_signal_stops_all_ranks_after_one_update(launch, found, number, ranks, whom):
    job = launch("train", ranks=ranks, recipe=RECIPE, overrides=[*LONG, "loader.num_workers=1"])
    if ranks == 1:
        wait_for_metrics(job)
        pids = [job.process.pid]
    else:
        pids = job.training_pids(ranks)
    begun = time.monotonic()
    aims = {
        "supervisor": [job.process.pid],
        "rank 1": pids[-1:],
        "all processes": [one.pid for one in psutil.Process(job.process.pid).children(recursive=True)],
    }
    for pid in aims[whom]:
        os.kill(pid, number)
    seconds, _, complained = stopped(job, begun)
    named = f"stopped by {number.name}" in complained
    found(
        f"{ranks} rank{'s' * (ranks > 1)}, {number.name} to {whom}: one checkpoint, status 75",
        seconds,
        named,
        phase="any",
        job=job,
    )
    assert named and seconds < SOON


@pytest.mark.long
@pytest.mark.timeout(180)
def test_max_time_stops_as_a_signal_does(start, found):
    job = start("train", recipe=RECIPE, overrides=[*LONG, "train.max_time=8 s"])
    begun = time.monotonic()
    seconds, _, complained = stopped(job, begun)
    named = "stopped by train.max_time (8 s" in complained
    found("2 ranks, train.max_time: one checkpoint, status 75", seconds - 8, named, phase="any", job=job)
    assert named


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_second_interrupt_ends_at_once(start, found):
    """While rank 1 stands still, so that the first one is never answered."""
    job = start(
        "train", recipe=RECIPE, overrides=["watch.callbacks=100 s"], env={"FAULT": "callback-step 1 6"}
    )
    job.training_pids(2, steps=6)
    job.process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert job.process.poll() is None
    begun = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    status, _, complained = job.finish(timeout=30)
    seconds = time.monotonic() - begun
    found("a second SIGINT", seconds, "SIGINT" in complained, phase="callback", job=job)
    assert status == 130 and seconds < 3 and "ended by SIGINT: no process is left" in complained


@pytest.mark.timeout(120)
@pytest.mark.parametrize("resume", ["newest", pytest.param(None, marks=pytest.mark.long)])
def test_a_second_job_in_the_folder_of_a_live_one_is_refused(fork, found, resume):
    job = fork("train", ranks=1, recipe=RECIPE, overrides=LONG)
    wait_for_metrics(job)
    begun = time.monotonic()
    second = fork("train", ranks=1, recipe=RECIPE, output_dir=str(job.out), resume=resume)
    status, said, complained = second.finish()
    named = f"belongs to a job that is running (process {job.process.pid} on " in complained
    found(
        f"a second job {'resumes' if resume else 'starts in'} the folder of a live one",
        time.monotonic() - begun,
        named,
    )
    assert (status, said) == (2, "") and named and job.process.poll() is None
    begun = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    seconds, _, complained = stopped(job, begun)
    assert "stopped by SIGTERM" in complained and seconds < SOON


def wait_for_metrics(job) -> None:
    end = time.monotonic() + 60
    while (
        not (job.out / "metrics.jsonl").exists()
        or '"step": 100,' not in (job.out / "metrics.jsonl").read_text()
    ):
        assert time.monotonic() < end and job.process.poll() is None, job.process.communicate()
        time.sleep(0.05)
