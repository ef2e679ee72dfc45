"""A run's folder that somebody takes away: seen within seconds, said, and what is left in memory is saved."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from paddle_dp.launch.command import Job
from paddle_dp.train import Callback, Moment, stopping
from paddle_dp.train.stopping import RunFolder
from tests.faults.conftest import ROOT, supervisors
from tests.jobs import run_in_one_fork

TINY = ROOT / "tests/faults/tiny.yaml"
CALLBACKS = "callbacks=[{use: metrics, every: 5 steps}, {use: checkpoint, every: 50 steps}]"


def test_a_folder_that_stays_is_not_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_lost(now=True)  # a script's run has none until it writes
    (tmp_path / "run").mkdir()
    assert not folder.is_lost(now=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert not folder.is_lost(now=True)


@pytest.mark.parametrize("way", ["deleted", "renamed", "replaced", "a file"])
def test_a_folder_that_is_another_one_is_lost(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    folder = RunFolder(path)
    path.rmdir() if way != "renamed" else path.rename(tmp_path / "other")
    path.mkdir() if way == "replaced" else way == "a file" and path.touch()
    assert not folder.is_lost()  # looked just now
    monkeypatch.setattr(stopping, "EVERY", 0.0)
    assert folder.is_lost()


@pytest.mark.parametrize(
    ("made", "left"),
    [(["logs"], "recipe.yaml"), (["logs"], "metrics.jsonl"), (["checkpoints", ".lock", "logs"], "logs")],
)
def test_a_folder_without_a_file_of_the_run_is_lost(tmp_path: Path, made: list[str], left: str) -> None:
    """`rm -r RUN/*` leaves the folder, and the lock in it: nothing was noticed, and metrics went nowhere. Checkpoints
    may be deleted, to make room on the disk: a script's run without `metrics` has `logs` besides them."""
    for name in made:
        (tmp_path / name).touch() if "." in name else (tmp_path / name).mkdir()
    folder = RunFolder(tmp_path)
    (tmp_path / "checkpoints").rmdir() if "checkpoints" in made else (tmp_path / left).touch()
    assert not folder.is_lost(now=True)
    (tmp_path / left).rmdir() if left == "logs" else (tmp_path / left).unlink()
    assert folder.is_lost(now=True)


class Empties(Callback):
    """Deletes all that is in the run's folder."""

    def step(self, moment: Moment) -> None:
        if moment.progress.step == 60:
            subprocess.run(f"rm -r {moment.trainer.run.folder}/*", shell=True, check=False)


def empties(run: object) -> Callback:
    return Empties()


LENGTH = "train.length=1000000 steps"


def test_a_run_whose_folder_is_emptied_says_so_saves_and_ends(tmp_path: Path) -> None:
    callbacks = CALLBACKS.replace("]", ", {use: tests.train.test_run_folder.empties}]")
    out = tmp_path / "run"
    job = Job(recipe=TINY, ranks=1, output_dir=str(out), overrides=(LENGTH, callbacks))
    status, _, complained = run_in_one_fork(job, ROOT)
    assert status == 1
    has_ended_well(out, complained)


@pytest.mark.processes
@pytest.mark.timeout(120)
# Each way is noticed in a test above; what follows is the same.
@pytest.mark.parametrize(
    "way", ["renamed", *(pytest.param(way, marks=pytest.mark.long) for way in ("deleted", "emptied"))]
)
def test_a_job_whose_folder_is_taken_away_says_so_saves_and_ends(tmp_path: Path, way: str) -> None:
    with supervisors(tmp_path) as start:
        job = start("train", ranks=2, overrides=[LENGTH, CALLBACKS])
        metrics, end = job.out / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and '"step": 60' in metrics.read_text()):
            assert job.process.poll() is None and time.monotonic() < end, job.process.communicate()
            time.sleep(0.05)
        if way == "emptied":
            # The job writes meanwhile: rm may meet a file that is gone, or a folder that is not empty any more.
            subprocess.run(f"rm -r {job.out}/*", shell=True, check=False)
        else:
            job.out.rename(tmp_path / "other")
        if way == "deleted":
            shutil.rmtree(tmp_path / "other")
        status, _, complained = job.finish()
    assert status == 1
    has_ended_well(job.out, complained)


def has_ended_well(out: Path, complained: str) -> None:
    """It said what it found, and at which step it saved."""
    found = re.search(
        rf"{out} was deleted, renamed, replaced or emptied .* ends after step (\d+);", complained
    )
    assert found and f"go on from step {found[1]}: " in complained, complained
    (manifest,) = (out / "checkpoints").glob(f"step-*{found[1]}/manifest.json")
    assert json.loads(manifest.read_text())
