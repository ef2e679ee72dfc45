"""A checkpoint that is written in the background is the one that is written at once, whole or not there at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.checkpoint import BackgroundSave, HostMemory, NotWrittenError, background, check, newest, save
from paddle_dp.checkpoint.tensors import tensor_shard
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh

OnRanks, SnapshotOf = Callable[[int, Callable[[Any], Any]], list[Any]], Callable[..., Any]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_background(snapshot: Any, folder: Path, mesh: Any, placed: Any = lambda path: None) -> Path:
    saving = BackgroundSave(snapshot, folder, mesh, placed)
    saving.wait()
    return saving.path


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_is_the_same_files(tmp_path: Path, snapshot_of: SnapshotOf, on_ranks: OnRanks, ranks: int) -> None:
    told: list[Path] = []

    def both(mesh: Any) -> list[Path]:
        snapshot = snapshot_of(7, mesh.rank, ranks)
        now = save(snapshot, tmp_path / "now", mesh)
        return [now, in_background(snapshot, tmp_path / "later", mesh, told.append)]

    now, later = on_ranks(ranks, both)[0]
    assert files(later) == files(now) and len(files(now)) == 2 + 2 * ranks
    assert told == [later]
    assert [path.name for path in later.parent.iterdir()] == [later.name]


class Gate:
    """Holds ranks back in the midst of their write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...] = (0, 1, 2)):
        self.opened = threading.Event()
        write = background.write_rank

        def held(snapshot: Any, partial: Path, rank: int) -> Any:
            if rank in ranks:
                assert self.opened.wait(20)
            return write(snapshot, partial, rank)

        monkeypatch.setattr(background, "write_rank", held)


def test_until_it_is_whole_the_one_before_is_the_newest(
    tmp_path: Path, snapshot_of: SnapshotOf, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ranks(2, lambda mesh: save(snapshot_of(1, mesh.rank, 2), tmp_path, mesh))
    gate = Gate(monkeypatch, ranks=(1,))

    def work(mesh: Any) -> list[Any]:
        saving = BackgroundSave(snapshot_of(2, mesh.rank, 2), tmp_path, mesh)
        before = saving.poll(), newest(tmp_path)
        mesh.wait("looked")
        gate.opened.set()
        saving.wait()
        return [*before, newest(tmp_path)]

    assert on_ranks(2, work) == [[False, tmp_path / "step-00000001", tmp_path / "step-00000002"]] * 2


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("before_its_part", [True, False])
def test_a_disk_that_fills_up_on_one_rank_is_the_same_error_on_all(
    tmp_path: Path, snapshot_of: SnapshotOf, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch,
    culprit: int, before_its_part: bool,
) -> None:  # fmt: skip
    on_ranks(3, lambda mesh: save(snapshot_of(1, mesh.rank, 3), tmp_path, mesh))
    write = background.write_rank

    def full(snapshot: Any, partial: Path, rank: int) -> Any:
        report = write(snapshot, partial, rank)
        if rank == culprit:
            raise OSError(28, os.strerror(28), str(partial / f"rank-{rank:05d}.safetensors"))
        return report

    def no_room(*given: Any) -> None:
        raise OSError(28, os.strerror(28))

    if before_its_part:
        monkeypatch.setattr(background, "write_rank", full)
    else:
        monkeypatch.setattr(background, "replace" if culprit else "finish", no_room)
    results = on_ranks(3, lambda mesh: in_background(snapshot_of(2, mesh.rank, 3), tmp_path, mesh))
    assert [type(result) for result in results] == [NotWrittenError] * 3
    assert len({str(result) for result in results}) == 1
    assert "No space left" in str(results[0]) and "step-00000002 was not saved" in str(results[0])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    check(tmp_path / "step-00000001")


def test_what_is_no_fault_of_the_disk_is_another_error(tmp_path: Path, on_ranks: OnRanks) -> None:
    from paddle_dp.checkpoint import Snapshot

    def work(mesh: Any) -> Path:
        own = {"bad": np.zeros(1)} if mesh.rank == 1 else {}
        snapshot = Snapshot(tensors={}, state={"progress": {"step": 1}}, rank_state=own)
        return in_background(snapshot, tmp_path, mesh)

    results = on_ranks(2, work)
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "own.own.bad is a ndarray" in str(results[0]) and not list(tmp_path.iterdir())


def test_a_rank_that_never_wrote_leaves_rank_0_waiting_only_as_long_as_it_is_told(
    tmp_path: Path, snapshot_of: SnapshotOf, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, ranks=(1,))

    def work(mesh: Any) -> bool:
        done = BackgroundSave(snapshot_of(2, mesh.rank, 2), tmp_path, mesh).finish_alone(0.05, 0.05)
        mesh.wait("both gave up")
        gate.opened.set()
        return done

    assert on_ranks(2, work) == [False, False]
    assert newest(tmp_path) is None


def test_it_is_put_into_place_without_any_exchange_after_its_beginning(
    tmp_path: Path, snapshot_of: SnapshotOf, on_ranks: OnRanks
) -> None:
    def work(mesh: Any) -> bool:
        return BackgroundSave(snapshot_of(2, mesh.rank, 2), tmp_path, mesh).finish_alone(20, 20)

    assert on_ranks(2, work) == [True, True]
    assert newest(tmp_path) == tmp_path / "step-00000002"


def test_host_memory_is_used_again_and_holds_what_the_tensors_held() -> None:
    import paddle

    memory = HostMemory()
    weights = [paddle.arange(5, dtype="float32"), paddle.ones([3, 2], "bfloat16"), paddle.to_tensor(2.5)]
    places = []
    for _ in range(2):
        room = memory.room("model", sum(w.size * w.element_size() for w in weights), len(weights))
        shards = [tensor_shard(str(n), w, room=room) for n, w in enumerate(weights)]
        places.append([shard.array.ctypes.data for shard in shards])
        for shard, weight in zip(shards, weights, strict=True):
            np.testing.assert_array_equal(shard.array, weight.numpy())
            assert shard.array.shape == tuple(weight.shape) and shard.array.ctypes.data % 8 == 0
        weights[0].set_value(weights[0] + 1)
        assert shards[0].array[0] != weights[0].numpy()[0]
    assert places[0] == places[1]
    with pytest.raises(ValueError, match=r"1000 bytes, where \d+ are left"):
        room.take(1000)
    room = HostMemory().room("model", 1, 1)
    room.take(65)
    with pytest.raises(ValueError, match="1 bytes, where 0 are left"):
        room.take(1)


def test_one_process_needs_no_file_of_another_rank(tmp_path: Path, snapshot_of: SnapshotOf) -> None:
    assert in_background(snapshot_of(3), tmp_path, Mesh.alone()) == newest(tmp_path)
