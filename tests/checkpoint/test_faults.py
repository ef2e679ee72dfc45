"""What the disk and the kernel do to a process that saves: real processes, real limits, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.checkpoint import check, checkpoints, clean, load, newest, save
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh
from tests.faults import deeds
from tests.ranks import run_ranks

SAVER = """
import os, sys, time
import numpy as np
from pathlib import Path
from paddle_dp.checkpoint import Snapshot, TensorShard, disk, prune, save
from paddle_dp.mesh import Mesh

def snapshot(step, size):
    w = TensorShard.full("w", np.full(size, step, np.float32))
    return Snapshot(tensors={"w": w}, state={"progress": {"step": step}})

folder = Path(sys.argv[1])
"""


def _start(script: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SAVER + script, str(folder)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)


def test_a_kill_in_mid_write_leaves_the_earlier_ones_whole(tmp_path):
    script = """
save(snapshot(1, 1000), folder, Mesh.alone())
chunks = disk._chunks
def some_then_hang(parts):
    for number, chunk in enumerate(chunks(parts)):
        if number == 3:
            print("writing", flush=True)
            time.sleep(60)
        yield chunk
disk._CHUNK, disk._chunks = 1000, some_then_hang
save(snapshot(2, 100_000), folder, Mesh.alone())
"""
    process = _start(script, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    _kill(process)
    partial = next(tmp_path.glob(".step-00000002.partial-*"))
    assert any(partial.iterdir()), "the kill came before the write"
    assert newest(tmp_path) == tmp_path / "step-00000001"
    assert clean(tmp_path) == [partial]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    "moment", [0.05, 0.17, *(pytest.param(later, marks=pytest.mark.long) for later in (0.11, 0.23))]
)
def test_a_kill_at_any_moment_leaves_one_that_is_whole(tmp_path, moment):
    """Saving, replacing and pruning as fast as it goes: whatever has a checkpoint's name is whole."""
    script = """
save(snapshot(1, 300_000), folder, Mesh.alone())
print("saved", flush=True)
for step in range(2, 10**6):
    for _ in range(2):
        saved = save(snapshot(step // 2, 300_000), folder, Mesh.alone())
    prune(folder, 2, trusted=saved)
"""
    process = _start(script, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    time.sleep(moment)
    _kill(process)
    clean(tmp_path)
    found = checkpoints(tmp_path)
    assert found and newest(tmp_path) == found[-1]
    for path in found:
        opened = load(path)
        assert (opened.read("w") == opened.state["progress"]["step"]).all()
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in found}


def test_a_file_that_may_not_grow_is_one_clear_error(tmp_path):
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save(snapshot(1, 1000), folder, Mesh.alone())
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save(snapshot(2, 100_000), folder, Mesh.alone())
except Exception as error:
    print(type(error).__name__, error)
"""
    said, _ = _start(script, tmp_path).communicate(timeout=60)
    assert said.startswith("NotWrittenError") and "File too large" in said and "step-00000002" in said
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 300 kB, where one may be mounted."""
    with deeds.small_disk(tmp_path / "disk", "300k") as mounted:
        if not mounted:
            pytest.skip("needs the right to mount")
        yield tmp_path / "disk"


def test_a_full_disk_leaves_the_earlier_ones_and_frees_what_it_took(small_disk, snapshot_of):
    first = save(snapshot_of(1), small_disk / "run", Mesh.alone())
    filler = small_disk / "filler"
    assert (
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True).returncode == 1
    )
    with pytest.raises(
        CheckpointError, match=r"No space left on device.* 0 B free.*Earlier checkpoints are untouched"
    ):
        save(snapshot_of(2), small_disk / "run", Mesh.alone())
    assert [p.name for p in (small_disk / "run").iterdir()] == [first.name]
    check(first)
    filler.unlink()
    check(save(snapshot_of(2), small_disk / "run", Mesh.alone()))


def test_a_folder_without_permission_is_one_clear_error(tmp_path, snapshot_of):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    privileged = os.geteuid() == 0
    if privileged:  # nothing is forbidden to root
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*another folder"):
            save(snapshot_of(1), folder, Mesh.alone())
    finally:
        if privileged:
            os.seteuid(0)
    assert not list(folder.iterdir())


def _save_twice(folder: str) -> list[str]:
    """A save that works and one that fails on the last rank, on real ranks over gloo."""
    from paddle_dp.checkpoint import Snapshot, TensorShard, rng_state
    from paddle_dp.mesh import join

    mesh = join()
    paths = []
    for step, own in (
        (1, {"rng": rng_state()}),
        (2, {"bad": object()} if mesh.rank == mesh.ranks - 1 else {}),
    ):
        tensors = {"w": TensorShard("w", (2, 3), (mesh.rank, 0), np.full((1, 3), mesh.rank, np.float32))}
        try:
            taken = Snapshot(tensors=tensors, state={"progress": {"step": step}}, rank_state=own)
            paths.append(str(save(taken, Path(folder), mesh)))
        except CheckpointError as error:
            paths.append(str(error))
    return [*paths, str(newest(Path(folder), mesh)), load(Path(paths[0]), mesh).read("w").tolist()]


def test_real_ranks_succeed_together_and_fail_together(tmp_path):
    first, second = run_ranks(_save_twice, 2, str(tmp_path))
    assert first == second
    saved, failed, found, weights = first
    assert saved == found == str(tmp_path / "step-00000001") and weights == [[0, 0, 0], [1, 1, 1]]
    assert "own.own.bad is a object" in failed and "rank 1" in failed
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
