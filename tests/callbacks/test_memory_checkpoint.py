"""Checkpoints in memory: the last two, in the job's folder, and nothing of them stays that a restart must not take."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks import memory_checkpoint
from paddle_dp.callbacks.memory_checkpoint import Config
from paddle_dp.checkpoint import Checks, NotWrittenError, Snapshot, TensorShard
from paddle_dp.checkpoint.manifest import MANIFEST
from paddle_dp.errors import UsageError
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.train import Callback, Run
from paddle_dp.train.judge import Refusal
from paddle_dp.units import Every
from tests.callbacks.moments import At

Save = Callable[[Callback, int], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory" / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    return tmp_path / "memory" / "checkpoints"


def steps(folder: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.checkpoints(folder)]


@pytest.fixture
def built(run: Run, at: At, trainer: SimpleNamespace) -> Callable[..., Callback]:
    """The callback, begun after step `begin`; the trainer's snapshot is of the step it is asked at."""
    weights = TensorShard("model/w", (2,), (0,), np.zeros(2, "float32"))
    trainer.snapshot = lambda: Snapshot(
        tensors={"model/w": weights},
        state={"progress": {"step": trainer.step}},
        checks=Checks(agreed=True, finite=True, step=trainer.step),
    )

    def build(begin: int = 0, resumed: Any = None) -> Callback:
        callback = Config().build(dataclasses.replace(run, resumed=resumed))
        callback.start(at("start", begin))
        return callback

    return build


@pytest.fixture
def save(at: At, trainer: SimpleNamespace) -> Save:
    def saved(callback: Callback, step: int) -> None:
        trainer.step = step
        callback.step(at("step", step))

    return saved


def test_the_last_two_are_kept_and_more_never_lie_there(
    folder: Path, built: Any, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[list[int]] = []
    real = checkpoints.save

    def noted(*arguments: Any, **named: Any) -> Path:
        before.append(steps(folder))
        return real(*arguments, **named)

    monkeypatch.setattr(checkpoints, "save", noted)
    callback = built()
    for step in (10, 20, 30, 30, 40):
        save(callback, step)
    assert steps(folder) == [30, 40] and before == [[], [10], [20], [30]]
    assert callback.every == Every.parse("10 steps") and not callback.reads and not callback.due_at_epoch(1)


def test_a_step_that_is_on_disk_is_not_written_again(
    folder: Path, built: Any, save: Save, at: At, tmp_path: Path
) -> None:
    callback = built()
    for step in (10, 20):
        save(callback, step)
    callback.saved(at("saved", 30), tmp_path / "run" / "checkpoints" / "step-00000030")
    save(callback, 30)
    assert steps(folder) == [10, 20]


def test_one_that_cannot_be_written_is_told_once_and_the_one_before_stays(
    folder: Path, built: Any, save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = built()
    save(callback, 10)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.safetensors")

    with monkeypatch.context() as patched:
        patched.setattr("paddle_dp.checkpoint.saving.write_tensors", full)
        for step in (20, 30):
            save(callback, step)
    save(callback, 40)
    assert capsys.readouterr().err.splitlines() == [
        f"step 20 is not kept in memory: No space left on device ({folder}). The training goes on."
    ]
    assert steps(folder) == [10, 40] and not [p for p in folder.iterdir() if p.name.startswith(".")]


def test_a_folder_that_the_job_has_removed_does_not_come_back(folder: Path, built: Any, save: Save) -> None:
    callback = built()
    save(callback, 10)
    shutil.rmtree(folder.parent)  # by the remover, while a rank of the killed job still lives
    save(callback, 20)
    assert not folder.parent.exists()


def test_after_a_rewind_later_steps_are_gone(folder: Path, built: Any, save: Save, at: At) -> None:
    callback = built()
    for step in (10, 20):
        save(callback, step)
    skipped, undone = (
        Refusal(step=21, epoch=0, batch=20, samples=(), why="nan", action=action)
        for action in ("skip", "rewind")
    )
    callback.refused(at("refused", 21), skipped)
    assert steps(folder) == [10, 20]
    callback.refused(at("refused", 15), undone)
    assert steps(folder) == [10]
    save(callback, 20)
    assert steps(folder) == [10, 20]


def test_a_restart_clears_what_a_kill_left_and_trusts_the_one_it_goes_on_from(
    folder: Path, built: Any, save: Save
) -> None:
    callback = built()
    for step in (10, 20):
        save(callback, step)
    (folder / ".step-00000030.partial-1-ab").mkdir()
    (folder / "step-00000020" / MANIFEST).write_text("{")  # damaged, so that the restart begins at step 10
    again = built(10, SimpleNamespace(folder=folder / "step-00000010"))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000010"]
    save(again, 20)
    save(again, 30)
    assert steps(folder) == [20, 30]
    checkpoints.check(folder / "step-00000020")


@pytest.fixture
def sized(run: Run, trainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callback]:
    """The callback for 4 weights of 4 bytes with their states, and 2 numbers in a buffer, where `free` bytes are."""

    def build(
        free: int, mesh: Any = None, optimizer: Any = None, ema: Any = None, level: str = "O1"
    ) -> Callback:
        tensor = {"shape": [4], "element_size": lambda: 4, "stop_gradient": False}
        buffer = {**tensor, "shape": [2], "stop_gradient": True}
        shards = [(name, SimpleNamespace(**each), None) for name, each in (("w", tensor), ("b", buffer))]
        trainer.learner.placed = SimpleNamespace(shards=lambda: iter(shards))
        precision = SimpleNamespace(precision=SimpleNamespace(level=level))
        config = SimpleNamespace(**({"states": 0} if optimizer is None else optimizer))
        recipe: Any = SimpleNamespace(optimizer=SimpleNamespace(config=config), ema=ema, train=precision)
        monkeypatch.setattr(memory_checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return Config().build(dataclasses.replace(run, recipe=recipe, mesh=mesh or run.mesh))

    return build


@pytest.mark.parametrize(
    ("optimizer", "ema", "level", "size"),
    [
        ({"states": 2}, None, "O1", 56),
        ({"states": 0}, None, "O1", 24),
        ({"states": 0}, "yes", "O2", 56),
        ({}, None, "O1", 56),
    ],
)
def test_it_is_refused_where_there_is_no_room_for_two(
    at: At, folder: Path, sized: Any, optimizer: dict[str, int], ema: Any, level: str, size: int
) -> None:
    sized(2 * size, None, optimizer, ema, level).refuse(at("refuse", 0))
    with pytest.raises(UsageError, match=rf"keeps 2 checkpoints of about {size} bytes each in .* are free"):
        sized(2 * size - 1, None, optimizer, ema, level).refuse(at("refuse", 0))


def test_a_schedule_that_it_could_not_save_is_refused(at: At, folder: Path, sized: Any, trainer: Any) -> None:
    callback = sized(2 * 24)
    trainer.learner.rate.schedule = SimpleNamespace(state_dict=lambda: {"rates": {0.1}})
    with pytest.raises(UsageError, match=r"^schedule\.rates is a set"):
        callback.refuse(at("refuse", 0))


def test_earlier_checkpoints_of_the_job_are_room_for_a_restart(at: At, folder: Path, sized: Any) -> None:
    (folder / "step-00000010").mkdir()
    (folder / "step-00000010" / "rank-00000.json").write_bytes(bytes(30))
    sized(2 * 24 - 30).refuse(at("refuse", 0))
    with pytest.raises(UsageError, match="where 47 bytes are free"):
        sized(2 * 24 - 31).refuse(at("refuse", 0))


class Peers:
    """A mesh of four ranks on two nodes, as this rank sees it: the others have 100 bytes each, and other folders."""

    def __init__(self, rank: int, memory: Path, free: int = 10_000):
        self.rank, self.is_main, self._memory, self._free = rank, rank == 0, memory, free

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [str(self._memory), str(self._memory), "elsewhere", "elsewhere"]
        return [value, [100, value[1]], [100, self._free], [100, 0]]


@pytest.mark.parametrize(
    ("here", "there", "node"), [(648, 648, None), (647, 648, "ranks 0, 1"), (648, 647, "ranks 2, 3")]
)
def test_the_room_of_each_node_is_that_of_its_files_and_copies(
    at: At, folder: Path, sized: Any, here: int, there: int, node: str | None
) -> None:
    """Two generations of everything: each of two nodes has the copies of the other one."""
    callback = sized(here, Peers(0, folder, there))
    if node is None:
        callback.refuse(at("refuse", 0))
        return
    words = rf"keeps 648 bytes in .* on the node of {node} \(its files and the copies .* 324 bytes; .*647 bytes are"
    with pytest.raises(UsageError, match=words):
        callback.refuse(at("refuse", 0))


@pytest.mark.parametrize(
    ("rank", "resumed", "steps_left"), [(0, 20, [20]), (0, None, []), (1, 20, [10, 20, 30])]
)
def test_what_another_attempt_left_in_a_nodes_memory_is_gone_before_the_first_update(
    run: Run, at: At, folder: Path, rank: int, resumed: int | None, steps_left: list[int]
) -> None:
    """Files of two pasts with one step must never be taken together. A node's first rank removes them."""
    for step in (10, 20, 30):
        (folder / f"step-{step:08d}").mkdir()
    at_step: Any = None if resumed is None else SimpleNamespace(folder=folder / f"step-{resumed:08d}")
    callback = Config().build(dataclasses.replace(run, resumed=at_step, mesh=Peers(rank, folder)))  # type: ignore[arg-type]
    callback.start(at("start", resumed or 0))
    assert steps(folder) == steps_left


@pytest.mark.parametrize(("rank", "kept"), [(0, [20, 30]), (1, [10, 20, 30])])
def test_on_several_nodes_the_first_rank_of_each_removes_old_ones(
    run: Run, at: At, folder: Path, save: Save, trainer: SimpleNamespace, monkeypatch: pytest.MonkeyPatch,
    rank: int, kept: list[int],
) -> None:  # fmt: skip
    """There are never more than two, and the one before stays while the next one is written."""
    before: list[list[int]] = []

    def written(snapshot: int, folder: Path, mesh: Any, ring: Any) -> Path:
        before.append(steps(folder))
        (folder / f"step-{snapshot:08d}").mkdir()
        return folder / f"step-{snapshot:08d}"

    monkeypatch.setattr(memory_checkpoint.node_copies, "save", written)
    callback = Config().build(dataclasses.replace(run, mesh=Peers(rank, folder)))  # type: ignore[arg-type]
    callback.start(at("start", 0))
    trainer.snapshot = lambda: trainer.step
    for step in (10, 20, 30):
        save(callback, step)
    assert steps(folder) == kept and (rank or before == [[], [10], [20]])


def test_on_several_nodes_the_line_names_the_rank_whose_memory_is_full(
    run: Run,
    at: At,
    folder: Path,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: Any) -> Path:
        raise NotWrittenError("It was not saved: full, on rank 3 of vm; 0 free.", "Make room.", "full")

    monkeypatch.setattr(memory_checkpoint.node_copies, "save", full)
    callback = Config().build(dataclasses.replace(run, mesh=Peers(0, folder)))  # type: ignore[arg-type]
    callback.start(at("start", 0))
    for step in (10, 20):
        save(callback, step)
    line = "step 10 is not kept in memory: It was not saved: full, on rank 3 of vm; 0 free. The training goes on.\n"
    assert capsys.readouterr().err == line


def test_a_training_without_a_folder_for_it_is_refused(
    run: Run, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MEMORY, raising=False)
    with pytest.raises(UsageError, match="serves the restarts"):
        Config().build(run).refuse(at("refuse", 0))
