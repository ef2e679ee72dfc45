"""One plain file of weights, from shards of any layout."""

import importlib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_dp.checkpoint import Snapshot, TensorShard, merge, save
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh

merging = importlib.import_module("paddle_dp.checkpoint.merge")  # the name is the function's, too
WHOLE = np.arange(12, dtype="float32").reshape(3, 4)


def saved(folder):
    halves = {
        f"{i}": TensorShard("model/fc.weight", (3, 4), (0, 2 * i), WHOLE[:, 2 * i : 2 * i + 2].copy())
        for i in range(2)
    }
    other = {"o": TensorShard.full("optimizer/fc.weight/moment1", WHOLE)}
    state = {"progress": {"step": 3}}
    return save(Snapshot(tensors={**halves, **other}, state=state), folder, Mesh.alone())


def test_pieces_become_whole_and_the_optimizer_stays_behind(tmp_path):
    assert merge(saved(tmp_path / "checkpoints"), tmp_path / "model.safetensors") == 1
    found = load_file(tmp_path / "model.safetensors")
    assert list(found) == ["fc.weight"]
    np.testing.assert_array_equal(found["fc.weight"], WHOLE)


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    path = saved(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="nowhere"):
        merge(path, tmp_path / "nowhere" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="was not written"):
        merge(path, Path())
    assert [info.name for info in tmp_path.iterdir()] == ["checkpoints"]


def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """Counted by Python's own allocator, which NumPy uses: the largest tensor, and the pieces that it is made of."""

    def loaded(path, load=merging.load):
        checkpoint = load(path)
        tracemalloc.reset_peak()  # that of the checksums is a buffer of a fixed size
        return checkpoint

    monkeypatch.setattr(merging, "load", loaded)
    rows, count = 1024, 12
    shards = {
        f"{n} {half}": TensorShard(
            f"model/{n}.weight", (2 * rows, 256), (half * rows, 0), np.full((rows, 256), float(n), "float32")
        )
        for n in range(count)
        for half in range(2)
    }
    path = save(Snapshot(tensors=shards, state={"progress": {"step": 3}}), tmp_path / "c", Mesh.alone())
    size = 2 * rows * 256 * 4
    tracemalloc.start()
    try:
        assert merge(path, tmp_path / "model.safetensors") == count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < peak < 2.5 * size
    found = load_file(tmp_path / "model.safetensors")
    assert all((found[f"{n}.weight"] == n).all() for n in range(count))
