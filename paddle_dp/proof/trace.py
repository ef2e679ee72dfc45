"""One side of a comparison: the first steps of a recipe in this layout, written down."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import Snapshot, save
from paddle_dp.data import Share
from paddle_dp.mesh import Mesh, join
from paddle_dp.parallel import Learner, Task
from paddle_dp.parallel.batch_norm import local_norms
from paddle_dp.parallel.holdings import Holdings
from paddle_dp.recipe import LoaderSettings, Recipe
from paddle_dp.train.assemble import Assembly
from paddle_dp.train.build import setup, task
from paddle_dp.train.meter import memory
from paddle_dp.train.state import pieces


@dataclass(frozen=True)
class Chosen:
    """Some samples of a data set, as a data set."""

    dataset: Any
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[int(self.indices[i])]


def short(batch: int, ranks: int) -> int:
    """The largest size below `batch` that is no multiple of `ranks`, so that some rank gets more than another."""
    return next((size for size in range(batch - 1, 0, -1) if size % ranks), max(batch - 1, 1))


def first_samples(recipe: Recipe, steps: int, ranks: int) -> Chosen:
    """What the recipe's first `steps` global batches hold, the last of them cut so that `ranks` ranks get unequal
    shares."""
    dataset = recipe.dataset.build("train")
    whole = Share(len(dataset), recipe.train.batch, seed=recipe.train.seed)
    full = min(steps - 1, whole.samples // whole.batch)
    room = min(whole.batch, whole.samples - full * whole.batch)
    count = full * whole.batch + (short(room, ranks) if room > 1 else room)
    return Chosen(dataset, whole.order(0)[:count])


def trace(recipe: Recipe, options: dict[str, Any]) -> None:
    """Learns options["steps"] batches and writes losses, gradient norms and weights into options["trace"].

    options["ranks"] is the larger side's number of ranks, so that both sides read the same batches. options["patch"],
    if any, is "module:function", called first.
    """
    if patch := options.get("patch"):
        module, _, function = patch.partition(":")
        getattr(import_module(module), function)()
    joined = join(seed=recipe.train.seed, device=recipe.train.device)
    chosen = first_samples(recipe, options["steps"], options["ranks"])
    per_epoch = Share(len(chosen.dataset), recipe.train.batch, last=recipe.train.last).batches

    def given(*_: int) -> Task:
        return task(recipe, recipe.train.length.steps(per_epoch), per_epoch)

    read: dict[str, Any] = {
        "dataset": lambda split: chosen,
        "shuffle": False,
        "last": "keep",
        "loader": LoaderSettings(),
    }
    assembly = Assembly(replace(setup(recipe), task=given, **read), joined)
    mesh, loader, learner = assembly.mesh, assembly.train_loader, assembly.learner()
    holdings = Holdings(learner)
    rows = [_step(learner, batch, mesh) for batch in loader.read(0)]
    learner.check("after the last step of the comparison")
    folder = Path(options["trace"])
    snapshot = Snapshot(tensors=pieces(learner), state={"progress": {"step": len(rows)}})
    save(snapshot, folder, mesh)
    peak, held = max(mesh.gather(memory(mesh.device))), mesh.gather(holdings.read())
    if mesh.is_first:
        record = {"rows": rows, "memory": peak, "held": held, "random": learner.random_differences()}
        record["local_norms"] = local_norms(learner.model)
        (folder / "trace.json").write_text(json.dumps(record))


def _step(learner: Learner, batch: Any, mesh: Mesh) -> dict[str, float]:
    learner.train_batch(batch, observe=True)
    shares = [share for share in mesh.gather(batch.mine if mesh.speaks else None) if share is not None]
    loss = mesh.sum([learner.observed["loss"]])[0]
    return {
        "loss": loss,
        "gradient_norm": learner.observed["gradient_norm"],
        "samples": batch.samples,
        "shares": shares,
    }
