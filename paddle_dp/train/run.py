"""A run: the name, folder, data and settings of one training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.data import Loader
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Layout

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint
    from paddle_dp.core.metric import Metric
    from paddle_dp.identity.facts import RunSignature
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True)
class Proof:
    """The proof of a run, as far as there is one. `verdict_key`: of the kept verdict of `paddle-dp verify` on just this
    training, or None; `sentence`: the verdict in words, or the command that gives one."""

    sentence: str
    verdict_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The argument of a callback's `build`.

    `recipe` is None for a training described in Python. `resumed`: the checkpoint that it resumes, and `changes`:
    sentences on the settings that differ from that checkpoint's. `layout`: how the model is split over the ranks.
    `identity`: the facts that its checkpoints keep. `proof` looks for the proof of a recipe that promises one
    process's result; None if it cannot have one. `metrics`: further scores of its evaluations.
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
    identity: RunSignature | None = None
    changes: tuple[str, ...] = ()
    proof: Callable[[], Proof] | None = None
    metrics: tuple[Metric, ...] = ()

    @property
    def max_time(self) -> float | None:
        """Seconds of this process after which it stops; None: no limit."""
        limit = None if self.recipe is None else self.recipe.train.max_time
        return None if limit is None else limit.seconds

    @property
    def steps_per_epoch(self) -> int:
        return self.train_loader.batches

    @property
    def evaluation_samples(self) -> int:
        """The number of samples of each evaluation; 0 without held-out data."""
        return 0 if self.test_loader is None else self.test_loader.sampler.samples

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
