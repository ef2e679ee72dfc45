"""The one place where parts meet: strategy → mesh → loaders → learner → trainer, for recipes, scripts and proofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import paddle

from paddle_dp import checkpoint as checkpoints
from paddle_dp.data import Loader, Sampler
from paddle_dp.data.sample import read_samples
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.seed import seed_ranks
from paddle_dp.parallel import Learner, Strategy, Task
from paddle_dp.parallel.finished import check_within
from paddle_dp.train import consistency, same_run
from paddle_dp.train.loop import TrainingLoop
from paddle_dp.train.run import Run
from paddle_dp.train.setup import Setup

Kind = TypeVar("Kind", bound=TrainingLoop)


class Assembly:
    """The parts of one training on this rank, each made when it is first asked for, with the strategy's mesh.

    Collective, as is everything that it makes. Raises UsageError for a layout that the recipe does not allow.
    """

    def __init__(self, setup: Setup, mesh: Mesh):
        self.setup = setup
        self._noticed: list[str] = []  # what is not as on one process, before anything is placed
        self._prints: dict[str, dict[str, str]] = {}  # the fingerprints of the splits that were opened
        consistency.compare_setups(setup, mesh)
        for part in (setup.strategy, *setup.asked.callbacks):
            part.refuse(setup.asked, mesh.ranks, mesh.device.partition(":")[0])
        self.strategy: Strategy = setup.strategy.build(mesh)
        # As the strategy splits it: it says which ranks read the same samples and draw the same numbers.
        self.mesh = self.strategy.mesh

    @cached_property
    def train_loader(self) -> Loader:
        """Shuffled, in micro-batches."""
        s, dataset = self.setup, self.setup.dataset("train")
        found = consistency.compare_data("training", dataset, s.seed, s.loader, self.mesh)
        self._prints["train"] = found
        self._noticed += consistency.random_samples("training", found)
        return self._loader(
            dataset, seed=s.seed, shuffle=s.shuffle, drop_last=s.drop_last, micro_batches=s.micro_batches
        )

    @cached_property
    def test_loader(self) -> Loader | None:
        """In order, every held-out sample once; None where nothing is held out."""
        s, dataset = self.setup, self.setup.dataset("test")
        self._prints["test"] = consistency.compare_data("held-out", dataset, s.seed, s.loader, self.mesh)
        return None if dataset is None else self._loader(dataset, seed=s.seed, shuffle=False)

    @property
    def total_steps(self) -> int:
        """How many updates the training has; 0 where nobody has said so yet."""
        return self.setup.length.steps(self.train_loader.batches) if self.setup.length else 0

    def learner(self, steps: int = 1, steps_per_epoch: int = 1) -> Learner:
        """The placed task, for so many updates; from here on every rank draws its own random numbers."""
        return self._placed(self._task(steps, steps_per_epoch))

    def _task(self, steps: int, steps_per_epoch: int) -> Task:
        """The task as all ranks have it, before anything is placed. Collective."""
        task = self.setup.task(steps, steps_per_epoch)
        task = replace(task, samples=self._samples, noticed=tuple(self._noticed))
        check_within(task.optimizer, task.loss.given, task.model)
        consistency.compare_task(task, self.mesh)
        return task

    def _placed(self, task: Task) -> Learner:
        learner = self.strategy.place(task)
        seed_ranks(self.setup.seed, self.mesh)
        return learner

    def _samples(self) -> Any:
        """The inputs of the first two samples: held-out ones, where the others have not been opened."""
        opened = "train_loader" in vars(self) or self.test_loader is None
        loader = self.train_loader if opened else self.test_loader
        assert loader is not None, "there are samples to train on"
        inputs, _ = read_samples(loader.dataset, np.arange(min(2, len(loader.dataset))), self.setup.seed, 0)
        return paddle.to_tensor(inputs)

    def trainer(self, kind: type[Kind], resume: str | None = None, accept: Sequence[str] = ()) -> Kind:
        """A trainer that is ready to fit, at its beginning or where a checkpoint left off.

        `resume` is None, "newest", "best" or a checkpoint's path; `accept`, keys that a resume may have otherwise.
        Raises UsageError or CheckpointError when there is nothing fitting to resume.
        """
        asked = {"resume": resume, "accept": sorted(accept)}
        consistency.compare(asked, self.mesh, "Go on from the same checkpoint on every node.")
        found = find_checkpoint(self.setup.folder, resume, self.mesh) if resume else None
        if found is not None:
            consistency.compare_checkpoints(found, self.mesh)
        loaders = {"train": self.train_loader, "test": self.test_loader}
        task = self._task(self.total_steps, self.train_loader.batches)
        changes: list[str] = []
        identity = same_run.identity(self.setup, task, self.mesh, loaders, self._prints)
        if found is not None:
            changes, identity = same_run.compare(found, identity, task, self.setup, self.mesh, accept)
        run = Run(
            name=self.setup.name,
            folder=self.setup.folder,
            mesh=self.mesh,
            train_loader=self.train_loader,
            test_loader=self.test_loader,
            recipe=self.setup.recipe,
            resumed=found,
            total_steps=self.total_steps,
            layout=self.setup.strategy.config.layout(self.mesh.ranks),
            identity=identity,
            changes=tuple(changes),
        )
        trainer = kind(
            self._placed(task),
            self.train_loader,
            self.setup.callbacks(run),
            run=run,
            check_every=self.setup.strategy.config.check_every,
        )
        if found is not None:
            trainer.restore(found)
        return trainer

    def _loader(self, dataset: Any, **how: Any) -> Loader:
        settings = self.setup.loader
        return Loader(
            dataset,
            Sampler.of(len(dataset), self.setup.batch, self.mesh, **how),
            num_workers=settings.num_workers,
            prefetch=settings.prefetch,
            timeout=settings.timeout.seconds,
        )


def find_checkpoint(folder: Path, which: str, mesh: Mesh) -> checkpoints.Checkpoint:
    """The checkpoint of the run in `folder` that `which` means: "newest", "best" or a path. Verified. Collective."""
    return checkpoints.load(checkpoints.find(which, folder / "checkpoints", mesh), mesh)
