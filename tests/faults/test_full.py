"""A disk that is full, and a full /dev/shm: what was saved stays, and training goes on where it can."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paddle_dp.checkpoint import checkpoints, step_of

RECIPE = "tests/faults/faulty.yaml"
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 4 MB large."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=10).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=10)


def test_a_full_disk_ends_no_training_and_the_checkpoint_before_stays(start, found, disk):
    """Filled while it trains, the logs' disk, too; when there is room again, the next checkpoint is saved."""
    overrides = ["train.length=100000 steps", "callbacks=[{use: checkpoint, every: 200 steps, keep: 2}]"]
    job = start("train", recipe=RECIPE, output_dir=str(disk / "run"), overrides=overrides)
    job.training_pids(2, steps=300)
    with open(disk / "fills", "wb", buffering=0) as file, suppress(OSError):
        begun = time.monotonic()
        while file.write(bytes(4096)):
            pass
    before = checkpoints(disk / "run" / "checkpoints")
    job.training_pids(2, steps=step_of(before[-1]) + 600)  # it has tried again
    assert checkpoints(disk / "run" / "checkpoints") == before
    (disk / "fills").unlink()
    end = time.monotonic() + 30
    while checkpoints(disk / "run" / "checkpoints")[-1] == before[-1]:
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
