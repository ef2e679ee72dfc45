"""A disk or a /dev/shm that is full, and a screen that nobody reads any more: the training ends as if it had not been
so, with all its metrics, and with the checkpoints for which there was room."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.checkpoint import checkpoints, step_of
from paddle_dp.train import Callback, Moment, Run
from tests.faults import deeds
from tests.house.runs import events

RECIPE = "tests/faults/faulty.yaml"
STEPS = 120
PATIENCE = [f"watch.{phase}=60 s" for phase in ("patience", "evaluate", "checkpoint", "callbacks", "start")]
LONG = [f"train.length={STEPS} steps", *PATIENCE]
CALLBACKS = (
    "callbacks=[{use: console, every: 1 step}, {use: metrics, every: 1 step}, {use: dashboard, every: 1 step}, "
    "{use: evaluate, every: 10 steps}, {use: checkpoint, every: 10 steps, keep: 2, async: %s}, "
    "{use: tests.faults.test_full_disk.Filler}]"
)


class Filler(Callback):
    """Made in the ranks: fills the disk of the run after step 30, and empties it after step 90."""

    reads = False

    def __init__(self, run: Run):
        self.file, self.is_main = run.folder.parent / "filler", run.mesh.is_main

    def step(self, moment: Moment) -> None:
        print(f"step {moment.progress.step} of the filler", flush=True)
        if self.is_main and moment.progress.step == 30:
            with open(self.file, "wb", buffering=0) as file:
                for size in (1 << 16, 1 << 10, 1):
                    while _took(file, size):
                        pass
        if self.is_main and moment.progress.step == 90:
            self.file.unlink()


def _took(file: Any, size: int) -> bool:
    try:
        return bool(file.write(bytes(size)))
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 8 MB, where one may be mounted."""
    with deeds.small_disk(tmp_path / "disk", "8m") as mounted:
        if not mounted:
            pytest.skip("needs the right to mount a file system")
        yield tmp_path / "disk"


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, False), (2, True)])
def test_a_disk_that_is_full_for_a_while(
    start: Any, found: Any, small_disk: Path, ranks: int, background: bool
) -> None:
    overrides = [*LONG, CALLBACKS % str(background).lower()]
    out = small_disk / "run"
    job = start("train", ranks=ranks, recipe=RECIPE, overrides=overrides, output_dir=str(out))
    status, said, complained = job.finish(timeout=150)
    assert status == 0, (said, complained)
    seen = events(out)
    assert [row["step"] for row in seen if row["event"] == "step"] == list(range(1, STEPS + 1))
    failed = [row["step"] for row in seen if row["event"] == "save_failed"]
    assert failed == [30, 40, 50, 60, 70, 80]
    logs = (
        said
        + complained
        + "".join(path.read_text(errors="replace") for path in out.glob("logs/*/workerlog.0"))
    )
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == [
        "step-00000110",
        "step-00000120",
    ]
    assert not list((out / "checkpoints").glob(".step-*"))
    how = "in the background" if background else "at once"
    fault = f"{ranks} rank{'s' * (ranks > 1)}, checkpoints {how}: the disk is full from step 30 to 90"
    first = next(row for row in seen if row["event"] == "save_failed")
    filled = next(row for row in seen if row["event"] == "step" and row["step"] == 30)
    named = "step-00000030 was not saved: No space left on device" in logs
    found(
        fault,
        first["time"] - filled["time"],
        named,
        phase="checkpoint",
        cost="0, 6 checkpoints are not written",
    )
    assert named


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_screen_that_nobody_reads_any_more(start: Any, found: Any, ranks: int) -> None:
    overrides = [
        *LONG,
        "callbacks=[{use: console, every: 1 step}, {use: metrics, every: 1 step}]",
    ]
    begun = time.monotonic()
    job = start("train", ranks=ranks, recipe=RECIPE, overrides=overrides)
    job.process.stdout.readline()
    job.process.stdout.close()
    job.process.stderr.close()
    assert job.process.wait(timeout=90) == 0
    assert [row["step"] for row in events(job.out, "step")] == list(range(1, STEPS + 1))
    fault = f"{ranks} rank{'s' * (ranks > 1)}: nobody reads the screen any more"
    found(fault, time.monotonic() - begun, True, phase="any", cost="0")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_full_disk_ends_no_training_and_the_checkpoint_before_stays(
    start: Any, found: Any, small_disk: Path
):
    """Filled while it trains, the logs' disk, too; when there is room again, the next checkpoint is saved."""
    overrides = ["train.length=100000 steps", "callbacks=[{use: checkpoint, every: 200 steps, keep: 2}]"]
    job = start("train", recipe=RECIPE, output_dir=str(small_disk / "run"), overrides=overrides)
    job.training_pids(2, steps=300)
    with open(small_disk / "fills", "wb", buffering=0) as file, suppress(OSError):
        begun = time.monotonic()
        while file.write(bytes(4096)):
            pass
    before = checkpoints(small_disk / "run" / "checkpoints")
    job.training_pids(2, steps=step_of(before[-1]) + 600)  # it has tried again
    assert checkpoints(small_disk / "run" / "checkpoints") == before
    (small_disk / "fills").unlink()
    end = time.monotonic() + 30
    while checkpoints(small_disk / "run" / "checkpoints")[-1] == before[-1]:
        assert time.monotonic() < end and job.process.poll() is None, job.process.communicate()
        time.sleep(0.1)
    job.process.send_signal(signal.SIGTERM)
    seconds = time.monotonic() - begun
    status, said, complained = job.finish(timeout=60)
    named = (
        re.search(r"The checkpoint \S+ was not saved: No space left on device", said + complained) is not None
    )
    found("the run's disk is full for some checkpoints", seconds, named, phase="checkpoint", job=job)
    assert named and status == 75, said + complained


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_full_dev_shm_is_no_matter_for_data_workers(start, found, tmp_path):
    """Their memory is anonymous. In a mount namespace of its own, whose /dev/shm is 64 KB."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    before = ["unshare", "-m", "bash", "-c", 'mount -t tmpfs -o size=64K tmpfs /dev/shm && exec "$@"', "in"]
    if subprocess.run([*before, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("no mount namespace can be made here")
    job = start("train", recipe=RECIPE, overrides=["loader.num_workers=2"], before=before)
    begun = time.monotonic()
    status, _, complained = job.finish(timeout=100)
    seconds = time.monotonic() - begun
    found(
        "/dev/shm has 64 KB, data workers: the training ends well", seconds, status == 0, phase="any", job=job
    )
    assert (status, complained) == (0, "")
