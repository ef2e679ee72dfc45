"""A training described in Python instead of YAML: your model, data and loss, and everything else as in a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader, Share
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.seed import part_ways
from paddle_dp.parallel import Task
from paddle_dp.part import read_part
from paddle_dp.recipe import Precision
from paddle_dp.recipe.folder import claim
from paddle_dp.train.callback import Callback
from paddle_dp.train.run import Run
from paddle_dp.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a recipe says, in Python. `train` and `test` are data sets with `len(d)` and `d[i] → (input, target)`.

    `batch` is the global batch. `loss(outputs, targets)` gives (total, count) or one loss per sample. `optimizer` is
    finished, or a function of (learning rate, named parameters). Parts (`strategy`, `callbacks`) are words, mappings
    as in a recipe, or, for callbacks, Callback objects. `resume` goes on from the newest checkpoint in `folder`.
    """

    model: Any
    loss: Any
    optimizer: Any
    train: Any
    batch: int
    test: Any = None
    micros: int = 1
    schedule: Any = None
    precision: Precision = field(default_factory=Precision)
    strategy: str | dict[str, Any] = "data_parallel"
    callbacks: Sequence[str | dict[str, Any] | Callback] = (
        "console",
        "metrics",
        "dashboard",
        "evaluate",
        "checkpoint",
    )
    folder: str | Path = "runs/script"
    seed: int = 0
    resume: bool = False
    loader: dict[str, Any] = field(default_factory=dict)

    def trainer(self) -> Trainer:
        """The trainer, ready to fit. Collective. Raises UsageError when the folder cannot be used."""
        mesh, folder = join(), Path(self.folder)
        if mesh.is_first:
            claim(folder, self.resume)
            checkpoints.clean(folder / "checkpoints")
        mesh.wait("run folder ready")
        found = (
            checkpoints.load(checkpoints.find("newest", folder / "checkpoints", mesh), mesh)
            if self.resume
            else None
        )
        train = self._loader(self.train, mesh, micros=self.micros)
        test = self._loader(self.test, mesh, shuffle=False) if self.test is not None else None
        run = Run(
            name=folder.name, folder=folder, mesh=mesh, train_loader=train, test_loader=test, resumed=found
        )
        strategy = _part("strategies", self.strategy).build(mesh)
        learner = strategy.place(self._task())
        part_ways(self.seed, mesh)
        check_every = getattr(strategy, "check_every", None)
        trainer = Trainer(learner, train, self._callbacks(run), run=run, check_every=check_every)
        if found is not None:
            trainer.restore(found)
        return trainer

    def _task(self) -> Task:
        return Task(
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            schedule=self.schedule,
            precision=self.precision,
        )

    def _loader(self, dataset: Any, mesh: Mesh, **how: Any) -> Loader:
        return Loader(dataset, Share.of(len(dataset), self.batch, mesh, seed=self.seed, **how), **self.loader)

    def _callbacks(self, run: Run) -> list[Callback]:
        """Callbacks from words; without held-out data there is nothing for `evaluate` to do."""
        words = [c for c in self.callbacks if not (c == "evaluate" and run.test_loader is None)]
        return [c if isinstance(c, Callback) else _part("callbacks", c).build(run) for c in words]


def _part(shelf: str, word: str | dict[str, Any]) -> Any:
    return read_part(shelf, {"use": word} if isinstance(word, str) else word)
