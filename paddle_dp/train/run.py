"""A run: one training's name and folder, its data, and what it was asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.rank_memory import Layout

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint
    from paddle_dp.recipe import Recipe
    from paddle_dp.train.facts import Identity


@dataclass(frozen=True, kw_only=True)
class Run:
    """What callbacks are built with.

    `recipe` is None for a run made in Python; `resumed`, the checkpoint it goes on from; `changes`, sentences on what
    is otherwise than there. `layout`: how the model lies on the ranks. `identity`: what its checkpoints say of what it
    learns.
    """

    name: str
    folder: Path
    mesh: Mesh
    train_loader: Loader
    test_loader: Loader | None = None
    recipe: Recipe | None = None
    resumed: Checkpoint | None = None
    total_steps: int = 0
    layout: Layout = field(default_factory=lambda: Layout(degrees=Degrees()))
    identity: Identity | None = None
    changes: tuple[str, ...] = ()

    @property
    def steps_per_epoch(self) -> int:
        return self.train_loader.batches

    @classmethod
    def plain(cls, mesh: Mesh, loader: Loader, folder: str | Path = "runs/run") -> Run:
        """A run without a recipe."""
        return cls(
            name=Path(folder).name,
            folder=Path(folder),
            mesh=mesh,
            train_loader=loader,
            layout=Layout(degrees=mesh.axes),
        )
