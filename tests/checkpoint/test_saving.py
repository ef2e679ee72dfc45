from __future__ import annotations

import os

import numpy as np
import pytest

from paddle_dp.checkpoint import Snapshot, TensorShard, check, load, newest, save, saving, step_of
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh


def _all_failed(results) -> str:
    """The one message that every rank raised."""
    assert all(isinstance(r, CheckpointError) for r in results), results
    assert len({str(r) for r in results}) == 1, results
    return str(results[0])


def test_one_process_saves_and_loads(tmp_path, snapshot_of):
    path = save(snapshot_of(7), tmp_path / "run" / "checkpoints", Mesh.alone())
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json",
    ]  # fmt: skip
    opened = load(path)
    assert (path.name, step_of(path), opened.state["progress"]["step"]) == ("step-00000007", 7, 7)
    np.testing.assert_array_equal(opened.read("model/w"), np.arange(24).reshape(6, 4) + 7)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_save_what_they_own(tmp_path, snapshot_of, on_ranks, ranks):
    paths = on_ranks(ranks, lambda mesh: save(snapshot_of(7, mesh.rank, ranks), tmp_path, mesh))
    assert set(paths) == {tmp_path / "step-00000007"}
    opened = load(paths[0])
    assert (opened.ranks, opened.rank_state(1), opened.rank_state(ranks)) == (ranks, {"rank": 1}, None)
    np.testing.assert_array_equal(opened.read("model/w"), np.arange(24).reshape(6, 4) + 7)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(
    tmp_path, snapshot_of, on_ranks, monkeypatch, culprit
):
    on_ranks(3, lambda mesh: save(snapshot_of(1, mesh.rank, 3), tmp_path, mesh))
    real = saving.write_tensors

    def full(path, shards):
        if path.name == f"rank-{culprit:05d}.safetensors":
            path.write_bytes(b"half")
            raise OSError(28, os.strerror(28), str(path))
        return real(path, shards)

    monkeypatch.setattr(saving, "write_tensors", full)
    message = _all_failed(on_ranks(3, lambda mesh: save(snapshot_of(2, mesh.rank, 3), tmp_path, mesh)))
    for words in (str(tmp_path / "step-00000002"), "No space left", f"rank {culprit} ", " free", "rank-0000"):
        assert words in message
    assert f"--resume {tmp_path.parent} --output-dir DIR (in a script resume=…, folder=…)." in message
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    check(tmp_path / "step-00000001")


def test_a_disk_that_fills_up_at_the_manifest_leaves_nothing(tmp_path, snapshot_of, on_ranks, monkeypatch):
    def full(self, folder):
        raise OSError(28, os.strerror(28), str(folder / "manifest.json"))

    monkeypatch.setattr(saving.Manifest, "write", full)
    message = _all_failed(on_ranks(2, lambda mesh: save(snapshot_of(2, mesh.rank, 2), tmp_path, mesh)))
    assert "No space left" in message and "manifest.json" in message and not list(tmp_path.iterdir())
    assert "(--output-dir DIR; in a script folder=…)" in message


def test_a_state_that_is_not_plain_is_said_on_all_ranks(tmp_path, on_ranks):
    def work(mesh):
        own = {"bad": np.zeros(1)} if mesh.rank == 1 else {}
        return save(Snapshot(tensors={}, state={"progress": {"step": 1}}, rank_state=own), tmp_path, mesh)

    message = _all_failed(on_ranks(2, work))
    assert "own.own.bad is a ndarray" in message and "rank 1" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "ranks", "said"),
    [("file/x", 2, "Not a directory"), ("", 3, "no rank holds model/w[4:6, 0:4]")],
    ids=["a folder that cannot be made", "a part that nobody saves"],
)
def test_what_cannot_be_saved_is_said_on_all_ranks(tmp_path, snapshot_of, on_ranks, name, ranks, said):
    (tmp_path / "file").write_text("")
    results = on_ranks(2, lambda mesh: save(snapshot_of(1, mesh.rank, ranks), tmp_path / name, mesh))
    assert said in _all_failed(results)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_the_machines_do_not_share_is_said(tmp_path, snapshot_of, on_ranks, monkeypatch):
    real = saving.write_tensors

    def elsewhere(path, shards):
        if path.name != "rank-00001.safetensors":
            return real(path, shards)
        (tmp_path / "local").mkdir()
        return real(tmp_path / "local" / path.name, shards)

    monkeypatch.setattr(saving, "write_tensors", elsewhere)
    results = on_ranks(2, lambda mesh: save(snapshot_of(1, mesh.rank, 2), tmp_path / "c", mesh))
    assert "all machines must share the folder" in _all_failed(results)


def test_a_second_save_of_a_step_takes_its_place(tmp_path, snapshot_of):
    first, second = snapshot_of(7), snapshot_of(7)
    second.state["again"] = True
    for one in (first, second):
        path = save(one, tmp_path, Mesh.alone())
    assert load(path).state["again"] is True
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]


def test_a_second_save_that_fails_leaves_the_first(tmp_path, snapshot_of, monkeypatch):
    path = save(snapshot_of(7), tmp_path, Mesh.alone())
    monkeypatch.setattr(saving, "publish", lambda *a: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(snapshot_of(7), tmp_path, Mesh.alone())
    assert newest(tmp_path) == path and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_every_file_and_folder_is_flushed_before_the_name_is_given(tmp_path, snapshot_of, monkeypatch):
    flushed, sync = [], os.fsync

    def noted(descriptor):
        flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    save(snapshot_of(7), tmp_path, Mesh.alone())
    partial, files = flushed[-2], [os.path.basename(f) for f in flushed[:-2]]
    assert partial.startswith(".step-00000007.partial-") and flushed[-1] == "."
    assert files == ["rank-00000.json", "rank-00000.safetensors", "state.json", "manifest.json"]


def test_a_slow_rank_is_waited_for_before_the_collective(tmp_path, snapshot_of):
    """gloo's collectives give up after 30 s; `wait` does not: it has to come between the disk and `gather`."""

    class Noted:
        rank, ranks, is_main, lost, calls = 0, 1, True, (), []

        def wait(self, name):
            self.calls.append("wait")

        def gather(self, value):
            self.calls.append("gather")
            return [value]

    mesh = Noted()
    save(snapshot_of(1), tmp_path, mesh)
    assert mesh.calls == ["wait", "gather"] * 3


def test_pieces_are_written_with_their_dtype(tmp_path):
    bits = np.array([0x3F80, 0xC000], np.uint16)
    tensors = {
        "a": TensorShard.full("a", bits, "bfloat16"),
        "b": TensorShard.full("b", np.ones(2, np.float16)),
    }
    path = save(Snapshot(tensors=tensors, state={"progress": {"step": 1}}), tmp_path, Mesh.alone())
    assert (load(path).dtype("a"), load(path).dtype("b")) == ("bfloat16", "float16")
    np.testing.assert_array_equal(load(path).read("a"), bits)
