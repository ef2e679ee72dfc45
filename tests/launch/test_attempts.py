"""The attempts of a job that starts again: where each begins, what the screen says, and how it all ends. No process is
started: what one attempt does is written down here."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.checkpoint import Checks, Snapshot, TensorShard, save
from paddle_dp.errors import UsageError
from paddle_dp.launch import attempts, logs
from paddle_dp.launch.command import Job, LaunchPlan
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.restarts import AttemptResult
from paddle_dp.launch.resume import ResumePoint, newest_point
from paddle_dp.launch.supervisor import ExternalEvents
from paddle_dp.mesh import Mesh

JOB = Job(recipe=Path("a.yaml"), ranks=2, restarts=3)


def saved(run: Path, step: int) -> Path:
    """A whole checkpoint of one small tensor."""
    w = TensorShard.full("model/w", np.full(4, step, np.float32))
    checks = Checks(agreed=True, finite=True, step=step)
    return save(
        Snapshot(tensors={"w": w}, state={"progress": {"step": step}}, checks=checks),
        run / "checkpoints",
        Mesh.alone(),
    )


def damaged(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


class Script:
    """Stands in for `run_once`: each attempt does the next thing of the script, which says how it ends."""

    def __init__(self, run: Path, *deeds: Callable[[], tuple[int, int] | str]):
        self.run, self.deeds = run, list(deeds)
        self.points: list[ResumePoint] = []
        self.folders: list[str] = []
        self.ranks: list[int] = []

    def __call__(
        self,
        plan: LaunchPlan,
        attempt: Path,
        inherited: Any,
        point: ResumePoint,
        started: float,
        outside: ExternalEvents,
        waiting: None,
    ) -> AttemptResult:
        self.stopped = outside.must_stop()
        self.points.append(point)
        self.folders.append(attempt.name)
        self.ranks.append(plan.ranks)
        status, step = self.deeds.pop(0)()
        result = AttemptResult(attempt=attempt, status=status, step=max(step, point.step), began=point.step)
        if not status:
            return result
        if status == 75:
            cause = Failure(rank=0, kind="StoppedError", message="stopped", exit_status=75, expected=True)
            return replace(result, cause=cause)
        cause = Failure(
            rank=1, kind="SIGKILL", message="ended by SIGKILL", exit_status=status, pid=1, host="h"
        )
        return replace(result, cause=cause, log=attempt / "workerlog.1")


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Script]]:
    """play(deed, …, job=…, ranks=…): the job's exit status, and what each attempt was given."""
    run = tmp_path / "run"

    def do(
        *deeds: Any,
        job: Job = JOB,
        ranks: Callable[[Any], int] = lambda history: 2,
        resize: Callable[[LaunchPlan], str] = lambda plan: "",
    ) -> tuple[int, Script]:
        script = Script(run, *deeds)
        monkeypatch.setattr(attempts, "run_once", script)
        attempt = logs.fresh(run)

        def next_plan(history: Any) -> LaunchPlan:
            began = attempt.stat().st_mtime
            return LaunchPlan(job=job, machine=Machine(cores=2), ranks=ranks(history), began=began)

        return attempts.run(next_plan, attempt, {}, resize), script

    monkeypatch.setattr("paddle_dp.launch.restarts.FIRST_WAIT", 0.002)
    return do


def dies(step: int, *saves: int, run: Path, status: int = 137) -> Callable[[], tuple[int, int]]:
    def deed() -> tuple[int, int]:
        for each in saves:
            saved(run, each)
        return status, step

    return deed


def test_each_attempt_begins_at_the_newest_checkpoint_with_logs_of_its_own(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    status, script = play(
        dies(5, run=run), dies(45, 20, 40, run=run), dies(46, run=run), dies(60, 60, run=run, status=0)
    )
    assert status == 0 and script.folders == [f"attempt-00{n}" for n in (1, 2, 3, 4)]
    assert [point.step for point in script.points] == [0, 0, 40, 40]
    at_40 = str(run / "checkpoints" / "step-00000040")
    assert [point.resume for point in script.points] == [None, None, at_40, at_40]
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [
        f"attempt-001 failed: rank 1 of 2 on h: ended by SIGKILL. Log: {run}/logs/attempt-001/workerlog.1",
        "starts again from the beginning in 0 s (restart 1 of 3; the count starts over after each new checkpoint)",
    ]
    assert (
        said[3]
        == "starts again from step 40 in 0 s (restart 1 of 3; the count starts over after each new checkpoint)"
    )
    assert said[5].startswith("starts again from step 40 in 0 s (restart 2 of 3; ") and len(said) == 6


def test_a_damaged_checkpoint_is_passed_over_and_named(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"

    def damages() -> tuple[int, int]:
        saved(run, 20)
        damaged(saved(run, 40))
        return 137, 45

    status, script = play(damages, dies(60, 40, 60, run=run, status=0))
    assert status == 0 and [point.step for point in script.points] == [0, 20]
    said = capsys.readouterr().err
    assert f"passed over the checkpoint {run}/checkpoints/step-00000040: " in said and "from step 20" in said


def test_an_attempt_begins_at_the_newest_of_disk_and_memory(tmp_path) -> None:
    run, memory, said = tmp_path / "run", tmp_path / "memory", []

    def begins() -> tuple[str | None, str]:
        point = newest_point(JOB, run, 0.0, said.append, memory)
        assert point.saved == point.step
        return point.resume, point.label

    at_20, at_30 = saved(run, 20), saved(memory, 30)
    assert begins() == (str(at_30), "step 30 in memory")
    damaged(saved(memory, 40))
    assert begins() == (str(at_30), "step 30 in memory") and "step-00000040" in said[0]
    at_50 = saved(run, 50)
    assert begins() == (str(at_50), "step 50")
    damaged(at_50), damaged(at_30)
    assert begins() == (str(at_20), "step 20")
    # An abandoned training's checkpoints on disk do not count, and those in memory are always this job's.
    os.utime(at_20 / "manifest.json", (1.0, 1.0))
    at_10 = saved(memory, 10)
    assert newest_point(replace(JOB, resume="5"), run, 1e12, said.append, memory).resume == str(at_10)


def test_where_no_checkpoint_can_be_used_nothing_is_begun_anew(tmp_path) -> None:
    """It may be the disk: the ranks shall say so, and not write over them."""
    said: list[str] = []
    damaged(saved(tmp_path, 20))
    assert newest_point(JOB, tmp_path, 0.0, said.append) == ResumePoint(
        resume="newest", label="--resume newest"
    )
    assert len(said) == 1 and "passed over the checkpoint" in said[0]
    for resume in (None, "newest"):
        assert newest_point(replace(JOB, resume=resume), tmp_path / "none", 0.0, said.append) == ResumePoint()


def test_an_abandoned_trainings_later_steps_are_not_gone_on_from(tmp_path) -> None:
    for step in (20, 60):
        os.utime(saved(tmp_path, step) / "manifest.json", (1.0, 1.0))
    job = replace(JOB, resume="20")
    assert newest_point(job, tmp_path, 1000.0, print) == ResumePoint(resume="20", label="--resume 20")
    at_40 = saved(tmp_path, 40)
    assert newest_point(job, tmp_path, 1000.0, print) == ResumePoint(
        resume=str(at_40), step=40, saved=40, label="step 40"
    )
    newest = newest_point(replace(JOB, resume="newest"), tmp_path, 1000.0, print)
    assert newest.step == 60


def test_a_resumed_job_counts_its_progress_from_where_it_began(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    damaged(saved(run, 60)), saved(run, 40)
    job = replace(JOB, resume="newest", restarts=1)
    status, script = play(dies(45, run=run), dies(46, run=run), job=job)
    assert status == 137 and [point.step for point in script.points] == [40, 40]
    assert "the restart was spent without a new checkpoint" in capsys.readouterr().err


def test_the_last_failures_status_is_the_jobs(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    status, script = play(dies(45, 40, run=run), dies(46, run=run, status=139), job=replace(JOB, restarts=1))
    assert status == 139 and not script.deeds
    *_, why, way = capsys.readouterr().err.splitlines()
    assert why == "not started again: the restart was spent without a new checkpoint."
    assert way == "go on from step 40: paddle-dp train a.yaml --ranks 2 --restarts 1 --resume"


def test_the_same_failure_three_times_ends_it(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    status, script = play(
        dies(45, 40, run=run), dies(45, run=run), dies(45, run=run), job=replace(JOB, restarts=9)
    )
    *_, why, way = capsys.readouterr().err.splitlines()
    assert status == 137 and not script.deeds
    assert (
        why
        == "not started again: the same failure three times after step 45, with no new checkpoint in between."
    )
    assert way == "go on from step 40: paddle-dp train a.yaml --ranks 2 --restarts 9 --resume"


def test_without_restarts_a_failure_is_the_end(play, tmp_path, capsys) -> None:
    status, script = play(dies(45, run=tmp_path / "run"), job=replace(JOB, restarts=0))
    assert status == 137 and script.folders == ["attempt-001"]
    assert "again" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_ends_it_at_once(play, tmp_path, monkeypatch, capsys, number) -> None:
    monkeypatch.setattr("paddle_dp.launch.restarts.FIRST_WAIT", 30.0)
    before = signal.signal(number, signal.default_int_handler)  # a shell's background ignores SIGINT
    try:
        threading.Timer(0.2, os.kill, [os.getpid(), number]).start()
        status, script = play(dies(5, run=tmp_path / "run"))
    finally:
        signal.signal(number, before)
    assert status == 128 + number and len(script.folders) == 1
    assert f"ended by {number.name}: no process is left." in capsys.readouterr().err


def test_how_many_ranks_there_are_is_asked_before_each_attempt(play, tmp_path, capsys) -> None:
    run = tmp_path / "run"

    def ranks(history: Any) -> int:
        if len(history) == 2:
            raise UsageError("1 rank is left, and --ranks 2:4 needs 2.")
        return 4 - len(history)

    status, script = play(dies(5, run=run), dies(6, run=run), ranks=ranks)
    assert status == 137 and script.ranks == [4, 3]
    assert "not started again: 1 rank is left, and --ranks 2:4 needs 2." in capsys.readouterr().err


def test_a_stop_for_another_number_of_ranks_is_no_failure(play, tmp_path, capsys) -> None:
    run, wanted = tmp_path / "run", [4, 3, 3]

    def resize(plan: LaunchPlan) -> str:
        return "" if plan.ranks == wanted[0] else f"{wanted[0]} ranks can be had now"

    def stops_at(step: int) -> Callable[[], tuple[int, int]]:
        def deed() -> tuple[int, int]:
            wanted.pop(0)
            return dies(step, step, run=run, status=75)()

        return deed

    job = replace(JOB, restarts=0, least_ranks=1)
    status, script = play(
        stops_at(20), dies(60, 60, run=run, status=0), job=job, ranks=lambda history: wanted[0],
        resize=lambda plan: resize(replace(plan, ranks=9)),
    )  # fmt: skip
    assert status == 0 and script.ranks == [4, 3] and [point.step for point in script.points] == [0, 20]
    assert capsys.readouterr().err.splitlines()[-1] == "goes on from step 20 on 3 ranks"


def test_a_stop_that_nobody_here_asked_for_ends_the_job(play, tmp_path) -> None:
    status, script = play(dies(20, 20, run=tmp_path / "run", status=75), job=replace(JOB, least_ranks=1))
    assert status == 75 and len(script.folders) == 1


def test_too_few_ranks_after_a_stop_end_the_job_with_a_sentence(play, tmp_path, capsys) -> None:
    asked: list[int] = []

    def ranks(history: Any) -> int:
        asked.append(0)
        if len(asked) > 1:
            raise UsageError("there are 1 ranks to be had now, and 2 are the least.")
        return 2

    deed = dies(20, 20, run=tmp_path / "run", status=75)
    status, _ = play(deed, ranks=ranks, resize=lambda plan: "1 rank can be had now")
    assert status == 75
    assert (
        "not started again: there are 1 ranks to be had now, and 2 are the least." in capsys.readouterr().err
    )


def test_a_ranks_own_exit_with_2_is_told_like_any_failure(play, tmp_path, capsys) -> None:
    status, _ = play(dies(45, 40, run=tmp_path / "run", status=2), job=replace(JOB, restarts=0))
    assert status == 2 and "\ngo on from step 40: paddle-dp train a.yaml" in capsys.readouterr().err
