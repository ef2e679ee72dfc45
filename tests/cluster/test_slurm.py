"""A real Slurm of two nodes on this machine: one job learns one process's numbers, and goes on after its time limit.

`pytest -m slurm`, after `apt-get install slurmctld slurmd slurm-client munge iproute2`. Each node has a separate
network; nothing outside of new namespaces is touched.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.slurm_engine import RECIPE, Slurm
from tests.eventually import eventually
from tests.faults.slow_run import are_right, at_step, losses, newest

Weights = dict[str, np.ndarray]
pytestmark = [
    pytest.mark.long, pytest.mark.slurm, pytest.mark.processes, pytest.mark.timeout(900),
]  # fmt: skip
BEFORE_LIMIT = r"#SBATCH --signal=.*\n"
STOPPING = "stopping after one of the next updates, with a checkpoint"


def row(case: str, happened: str) -> None:
    """Prints a row of the table in docs/reliability.md: `pytest -m slurm -rP` shows it."""
    print(f"| {case} | {happened} | load {os.getloadavg()[0]:.0f} |")


def distance_after_next_job(slurm: Slurm, folder: Path, right: Weights) -> float:
    """Submits a folder's job once more, which goes on from the newest checkpoint to its end: how far from `right`."""
    job = slurm.submit(folder, slow="0")
    job.until("COMPLETED")
    return are_right(job.out, right)


def test_two_nodes_are_one_job(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("srun", "-N2", "--ntasks-per-node=1", "paddle-dp", "train", RECIPE, "--ranks", "1")
    refused = slurm(*words, "--output-dir", out, status=2).stderr
    assert "Slurm has started this command on 2 nodes, and each would work alone" in refused
    assert not out.exists()
    began = time.time()
    slurm(*words, "--nodes", "auto", "--output-dir", out, SLOW="0")
    row("srun --nodes auto", f"ends with 0 after {time.time() - began:.0f} s")
    assert len(losses(out)) == 300
    assert are_right(out, right) == 0.0


def test_a_job_goes_on_after_its_time_limit(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    """SIGUSR1 before the limit, a checkpoint, status 75, requeue, --resume: three turns, and the bits of one."""
    limits = ("--time=00:02:00", "--signal=USR1@30", "--cpus-per-task=1")  # 90 s after the begin
    job = slurm.submit(tmp_path, *limits, slow="0.5")
    eventually(lambda: job.turns() == 1, 200, pause=1)
    first, requeued = newest(job.out), time.time()
    assert 0 < first < 300
    # On a busy machine a start takes most of two minutes: the later turns have no limit.
    slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=01:00:00")
    eventually(lambda: newest(job.out) > first, 200, pause=1)
    again = time.time() - requeued
    slurm("scancel", "--signal=USR1", job.number)  # as at the limit, and sooner
    eventually(lambda: job.turns() == 2, 200, pause=1)
    job.until("COMPLETED")
    assert job.screen().count(f"SIGUSR1: {STOPPING}") >= 2
    assert newest(job.out) == 300
    assert are_right(job.out, right) == 0.0
    row(
        "time limit",
        f"checkpoint of step {first}, status 75, requeued; a later checkpoint {again:.0f} s after that",
    )


def test_a_signal_before_the_first_update_of_a_first_turn(slurm: Slurm, tmp_path: Path) -> None:
    """There is nothing to go on from: it is not requeued."""
    job = slurm.submit(tmp_path)
    eventually(lambda: len(job.tasks()) == 2, 60, pause=0.1)
    slurm("scancel", "--signal=USR1", job.number)
    job.until("FAILED", 120)
    assert job.turns() == 0 and newest(job.out) == 0
    row("USR1 before the first update", f"{job.shown('ExitCode')}, FAILED, not requeued")


def test_scancel_saves_a_checkpoint(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    """SIGTERM, and SIGKILL after KillWait (60 s here; Slurm's own is 30 s)."""
    job = slurm.submit(tmp_path)
    at_step(job.out, 40, 200)
    before = newest(job.out)
    slurm("scancel", job.number)
    cancelled = time.time()
    job.until("CANCELLED", 200)
    eventually(lambda: not job.processes(), 200, pause=0.2)
    seconds = time.time() - cancelled
    assert f"SIGTERM: {STOPPING}" in job.screen()
    assert newest(job.out) > before and job.turns() == 0
    row("scancel", f"checkpoint of step {newest(job.out)} after {before}, all ended after {seconds:.1f} s")
    assert distance_after_next_job(slurm, tmp_path, right) == 0.0


def test_a_job_that_is_stopped_for_good_is_not_requeued(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path)
    at_step(job.out, 40, 200)
    slurm("scontrol", "update", f"JobId={job.number}", "Requeue=0")
    slurm("scancel", "--signal=USR1", job.number)
    asked = time.time()
    job.until("FAILED", 200)
    seconds, saved = time.time() - asked, newest(job.out)
    assert job.shown("ExitCode") == "75:0" and job.turns() == 0
    assert f"SIGUSR1: {STOPPING}" in job.screen()
    row("Requeue=0, scancel --signal=USR1", f"checkpoint of step {saved}, 75, not requeued, {seconds:.1f} s")
    print(job.screen())
    assert distance_after_next_job(slurm, tmp_path, right) == 0.0 and len(losses(job.out)) == 300


def test_a_preempted_job_goes_on(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path)
    at_step(job.out, 40, 200)
    other = slurm("sbatch", "-pfirst", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5")
    asked = time.time()
    eventually(lambda: job.turns() >= 1, 200, pause=0.5)
    seconds, saved = time.time() - asked, newest(job.out)
    job.until("COMPLETED")
    assert f"SIGTERM: {STOPPING}" in job.screen()
    assert are_right(job.out, right) == 0.0
    state = slurm("scontrol", "show", "job", other.stdout.split()[-1]).stdout
    row("preemption", f"checkpoint of step {saved}, requeued {job.turns()} times, after {seconds:.0f} s")
    assert "JobState=COMPLETED" in state and job.turns() == 1


def test_a_time_limit_without_a_signal_before_it(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    """SIGTERM at the limit, and SIGKILL after KillWait (60 s here; Slurm's own is 30 s)."""
    job = slurm.submit(tmp_path, "--time=00:01:00", cut=BEFORE_LIMIT, slow="0.5")
    job.until("TIMEOUT")
    eventually(lambda: not job.processes(), 200, pause=0.2)
    saved = newest(job.out)
    assert f"SIGTERM: {STOPPING}" in job.screen()
    assert 0 < saved < 300
    row("time limit without --signal", f"checkpoint of step {saved}, TIMEOUT, requeued {job.turns()} times")
    assert distance_after_next_job(slurm, tmp_path, right) == 0.0


def test_a_killed_task_requeues_the_job(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path)
    at_step(job.out, 40, 200)
    os.kill(job.tasks()[1], signal.SIGKILL)
    killed = time.time()
    eventually(lambda: job.turns() == 1, 120, pause=0.2)
    seconds, saved = time.time() - killed, newest(job.out)
    eventually(lambda: newest(job.out) > saved, 200, pause=0.2)
    later = time.time() - killed
    job.until("COMPLETED")
    assert re.search(r"node 1 \(.*\) is lost", job.screen())
    assert are_right(job.out, right) == 0.0 and len(losses(job.out)) == 300
    row(
        "kill -9 of a task",
        f"requeued after {seconds:.1f} s with step {saved}; a later checkpoint after {later:.0f} s",
    )


def test_a_node_that_is_lost_requeues_the_job(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    """Its slurmd is killed: its tasks live, and Slurm learns it after SlurmdTimeout (30 s)."""
    job = slurm.submit(tmp_path, slow="0.5")
    at_step(job.out, 40, 200)
    os.kill(slurm.daemon(1), signal.SIGKILL)
    killed = time.time()
    eventually(lambda: job.turns() == 1, 200, pause=0.5)
    seconds = time.time() - killed
    eventually(lambda: not job.processes(), 100)
    saved = newest(job.out)
    slurm.start_daemon(1)
    job.until("COMPLETED", 400)
    assert f"SIGTERM: {STOPPING}" in job.screen()
    assert are_right(job.out, right) == 0.0 and len(losses(job.out)) == 300
    row(
        "kill -9 of a slurmd",
        f"requeued after {seconds:.0f} s, checkpoint of step {saved}, goes on to the end",
    )


def test_a_job_on_a_drained_node_comes_to_its_end(slurm: Slurm, right: Weights, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path)
    at_step(job.out, 40, 200)
    try:
        slurm("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=test")
        assert slurm("sinfo", "-h", "-p", "main", "-n", "node1", "-o", "%t").stdout.strip() == "drng"
        job.until("COMPLETED")
    finally:
        slurm("scontrol", "update", "NodeName=node1", "State=RESUME")
    assert job.turns() == 0 and are_right(job.out, right) == 0.0
    row("drain", "drng; the job ends with 0")
