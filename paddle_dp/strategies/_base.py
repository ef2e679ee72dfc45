"""The contract of a strategy: the base class of each Config, with the defaults of plain data parallelism.

A strategy is used in three steps. Before a process starts, `refuse` rejects recipes that it cannot train, and `layout`
describes how a model is laid out on so many ranks, for the launcher, `paddle-dp check`, the memory forecast and
callbacks, which need not know the strategy's settings. In each rank, `build` starts what the layout needs (process
groups) and returns a `parallel.Strategy`, whose `mesh` is split over the layout's axes; loaders and random seeds use
that mesh. Its `place(task)` then returns the finished learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.rank_memory import Layout
from paddle_dp.units import Every, Recompute

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh
    from paddle_dp.parallel import Strategy
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    recompute: Recompute = Recompute.parse("none")
    """What backward recomputes instead of keeping it: less memory, more time."""

    check_every: Every | None = Every.parse("100 steps")
    """How often weights are checked: bit-equal on ranks that hold copies, and finite; null: only at the start, at
    saves and at the end."""

    def layout(self, ranks: int) -> Layout:
        """How a model is laid out on `ranks` ranks; by default whole on each."""
        return Layout(degrees=Degrees(data=ranks), recompute=self.recompute)

    @property
    def partitions_model(self) -> bool:
        """Whether a rank keeps a part of the model, and `place` takes one without memory for its weights
        (`parallel.initial_weights`), of which it draws that part; by default `place` takes finished models."""
        return False

    @property
    def batch_chunks(self) -> int:
        """Parts of a batch that one process computes apart: a proof on one rank compares something where it is more
        than 1."""
        return 1

    @property
    def accelerators(self) -> int:
        """Accelerators that one rank computes on, where there are any."""
        return 1

    @property
    def with_fewer(self) -> str:
        """Where a rank computes on several: what it does with them, and what to set where fewer are seen; the end of a
        sentence."""
        return ""

    @property
    def chained(self) -> str:
        """The setting under which forward must be the model's blocks one after another, if it names them; "" for
        none."""
        return "strategy.recompute" if self.recompute.blocks else ""

    @property
    def servers(self) -> int:
        """How many of the first ranks read no samples, and need no device: they compute on CPUs."""
        return 0

    @property
    def sync_batch_norm(self) -> bool | None:
        """Whether the ranks' BatchNorms exchange within the forward."""
        return False

    @property
    def single_process(self) -> bool:
        """Whether it is one rank by itself, and several take another strategy."""
        return False

    @property
    def may_lose_ranks(self) -> bool:
        """Whether a training goes on when one of some ranks dies: those that say so in their heartbeats."""
        return False

    def not_promised(self, recipe: Recipe) -> str:
        """Why a training is not one process's up to rounding, and what can be compared instead, in a sentence that
        `paddle-dp verify` prints instead of comparing; "" where it is to be, which is the default."""
        return ""

    @property
    def compared_by_step(self) -> bool:
        """Whether `paddle-dp verify` compares it although a training is not one process's (`not_promised`): each step
        by itself, from the weights that the ranks had."""
        return False

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError where the recipe cannot be trained so on `ranks` ranks of `device` ("cpu" or "gpu").

        By default only what no strategy's ranks would train is refused. Called before any process starts, and again in
        each.
        """
        from paddle_dp.parallel.preflight import preflight_check

        preflight_check(recipe, self.layout(ranks))

    def build(self, mesh: Mesh) -> Strategy:
        """Prepares this process and returns what places models. Collective. Raises UsageError for a mesh that does not
        fit."""
        raise NotImplementedError
