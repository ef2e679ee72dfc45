"""A run in an empty folder, and moments of a trainer that does nothing by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paddle_dp.callbacks import evaluate
from paddle_dp.checkpoint import Snapshot, TensorShard
from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh
from paddle_dp.train import Evaluation, Moment, Progress, Run


class Squares:
    """Eight samples: pictures [1, 4, 4] of one grey, in two classes."""

    classes = ("dark", "light")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        picture = np.full((1, 4, 4), index, "float32")
        picture[0, 0, 0] = np.random.rand() + 10
        return picture, index // 4


@pytest.fixture
def run(tmp_path: Path) -> Run:
    loader = Loader.plain(Squares(), batch=2)
    return Run(
        name="squares", folder=tmp_path / "run", mesh=Mesh.alone(), train_loader=loader, test_loader=loader
    )


@pytest.fixture
def trainer(run: Run) -> SimpleNamespace:
    """Of 20 steps, 4 in an epoch; what it is asked to do is kept in `asked`. A snapshot is of its `step`."""
    asked: list[Any] = []
    fake = SimpleNamespace(total_steps=20, early_end=None, asked=asked, mesh=Mesh.alone())
    fake.facts, fake.differences, fake.unknown = ["same global batches"], [], []
    fake.stop = asked.append
    fake.tell_saved = lambda path, progress=None, numbers=None: asked.append(("saved", path))
    fake.tell_save_failed = lambda error, progress=None: asked.append(("not saved", error))
    fake.evaluate = lambda: asked.append("evaluate")
    weights = TensorShard("model/w", (2,), (0,), np.zeros(2, "float32"))
    fake.step = 0
    fake.snapshot = lambda memory=None: Snapshot(
        tensors={"model/w": weights}, state={"progress": {"step": fake.step}}
    )
    placed = SimpleNamespace(is_split=False)
    fake.learner = SimpleNamespace(rate=SimpleNamespace(schedule=None), placed=placed)
    fake.callbacks, fake.plateau = [evaluate.Config().build(run)], None
    fake.evaluation_names = lambda: {"loss", "acc1", "glossary"}
    return fake


@pytest.fixture
def at(trainer: SimpleNamespace) -> Callable[..., Moment]:
    """`at("step", 5, loss=1.0)`: the moment of that name after step 5, with these numbers."""

    def moment(name: Any, step: int, **numbers: float) -> Moment:
        progress = Progress(epoch=step // 4, batch=step % 4, step=step, samples=2 * step)
        return Moment(name=name, progress=progress, trainer=trainer, numbers=numbers)  # type: ignore[arg-type]

    return moment


@pytest.fixture
def found() -> Callable[..., Evaluation]:
    """`found(acc1=0.5)`: an evaluation of 8 samples with these numbers."""

    def evaluation(**numbers: float) -> Evaluation:
        confusion = np.array([[3, 1], [0, 4]])
        return Evaluation(numbers=numbers, samples=8, confusion=confusion, classes=("dark", "light"))

    return evaluation
