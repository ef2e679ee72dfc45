"""Branches of a model that do not depend on one another, each on a rank of its own; and the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.rank_memory import Layout
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.units import Positive

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh
    from paddle_dp.parallel import Learner, Task
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    """The `branches` tables of the model's layers say which they are (docs/parallelism.md). Ranks that share the
    branches read the same samples; in messages and layouts theirs is the tensor axis."""

    over: Positive = 2
    """Ranks among which the branches of each layer are dealt."""

    data: Positive | Literal["auto"] = "auto"
    """Data-parallel ranks; `auto`: as many as `over` leaves."""

    sync_batch_norm: bool = False
    """BatchNorm over the samples of all data ranks, as on one process."""

    def layout(self, ranks: int) -> Layout:
        data = max(ranks // self.over, 1) if self.data == "auto" else self.data
        return Layout(degrees=Degrees(data=data, tensor=self.over), recompute=self.recompute)

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError unless `over` × `data` are the ranks, on CPUs, and the model has a table of branches."""
        from paddle_dp.parallel.branches import tables_of
        from paddle_dp.parallel.preflight import built_without_memory

        self._check(ranks, "cpu" if recipe.train.device == "auto" else recipe.train.device)
        if self.recompute.blocks or str(self.recompute) != "none":
            raise UsageError("strategy branches runs each branch once: set strategy.recompute=none.")
        model = built_without_memory(recipe.build_model)
        if model is not None and not tables_of(model):
            raise UsageError(
                f"strategy branches: model {recipe.model.name} has no layer with a `branches` table. Give it one in "
                "the recipe, model.branches: {pattern of layers: [[layer, …], …]} (docs/parallelism.md)."
            )
        super().refuse(recipe, ranks, device)

    def _check(self, ranks: int, device: str) -> None:
        degrees = self.layout(ranks).degrees
        if degrees.ranks != ranks:
            raise UsageError(
                f"strategy.over={self.over} with strategy.data={self.data} are {degrees.ranks} ranks, and there are "
                f"{ranks}: start a multiple of {self.over}, or set strategy.over."
            )
        if device != "cpu":
            raise UsageError(
                f"strategy branches sends activations from the memory of hosts, and this device is {device}: choose "
                "data_parallel or hybrid."
            )

    def build(self, mesh: Mesh) -> Branches:
        """Prepares Paddle's groups on CPUs. Collective."""
        from paddle_dp.gloo import install

        self._check(mesh.ranks, mesh.device)
        if mesh.ranks > 1:
            install(mesh.device)
        return Branches(self, replace(mesh, degrees=self.layout(mesh.ranks).degrees))


@dataclass(frozen=True)
class Branches:
    """Places a model: its branches on a rank each, the rest on all."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """A learner for this rank's branches and what all ranks have. Collective. Raises UsageError for a table that
        does not say what the model does."""
        from paddle_dp.parallel import place_whole, prepare
        from paddle_dp.parallel.batch_norm import synchronize
        from paddle_dp.parallel.branches import BranchesLearner, branched
        from paddle_dp.parallel.clip import take_clips
        from paddle_dp.parallel.data_group import Ranks
        from paddle_dp.parallel.exchange.gradient_exchange import among
        from paddle_dp.parallel.placement import Placements
        from paddle_dp.parallel.samplewise import mixing

        axes, me, noticed = self.mesh.axes, self.mesh.rank, list[str]()
        if self.mesh.ranks == 1:
            return place_whole(task, self.mesh)
        group, data = Ranks.of(axes, me, "tensor"), Ranks.of(axes, me, "data")
        if axes.data > 1:
            noticed = mixing(task.model, task.samples, task.dropout == "exact")
            if self.config.sync_batch_norm:
                synchronize(task.model, data)
        placements = Placements()
        shared = branched(task.model, task.samples, group, placements, compare=not task.compared)
        prepared = prepare(task, self.mesh)
        learner = prepared.learner(
            BranchesLearner, noticed=noticed, hcg=None, dp_world_size=1, placements=placements, shared=shared,
            clips=take_clips(prepared.optimizer), branch_ranks=group, data_ranks=data,
        )  # fmt: skip
        assert list(data.ranks) == among(axes, me, "data")
        learner.check("after the weights were placed")
        return learner
