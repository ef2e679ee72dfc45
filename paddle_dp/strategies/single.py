"""Training in one process: the reference for every other strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.strategies._base import StrategyConfig

if TYPE_CHECKING:
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    @property
    def single_process(self) -> bool:
        return True

    @property
    def takes_turns(self) -> bool:
        return True

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError for more than one rank."""
        _check(ranks)
        super().refuse(recipe, ranks, device)

    def build(self, mesh: Mesh) -> Single:
        _check(mesh.ranks)
        return Single(self, mesh)


def _check(ranks: int) -> None:
    if ranks > 1:
        raise UsageError(
            f"strategy single runs on one rank, and this job has {ranks}: start it with --ranks 1, or choose "
            "strategy.use=data_parallel."
        )


@dataclass(frozen=True)
class Single:
    """Places a model on one rank."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        from paddle_dp.learner import full_model_learner
        from paddle_dp.model.recompute import recomputed

        recomputed(task.model, self.config.recompute)
        return full_model_learner(task, self.mesh)
