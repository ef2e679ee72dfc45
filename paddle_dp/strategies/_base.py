"""The contract of a strategy: the base class of each Config, with the defaults of plain data parallelism.

A strategy is used in three steps. Before a process starts, `refuse` rejects recipes that it cannot train, and `layout`
describes how a model is laid out on so many ranks, for the launcher, `paddle-dp check`, the memory forecast and
callbacks, which need not know the strategy's settings. In each rank, `build` creates the layout's process groups and
returns a `learner.Strategy` with a `mesh` that is split over the layout's axes; loaders and random seeds use that
mesh. Its `place(task)` then returns the finished learner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Blocks, Layout, RankMemory
from paddle_dp.units import Every, Recompute

if TYPE_CHECKING:
    from paddle import nn

    from paddle_dp.learner import Strategy
    from paddle_dp.mesh import Mesh
    from paddle_dp.plan.bound import Wire
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    recompute: Recompute = Recompute.parse("none")
    """Activations that backward recomputes instead of keeping them: less memory, more time."""

    check_every: Every | None = Every.parse("100 steps")
    """How often weights are checked: bit-equal on ranks that hold copies, and finite; null: only at the start, at
    saves and at the end."""

    def layout(self, ranks: int) -> Layout:
        """How a model is laid out on `ranks` ranks; by default whole on each."""
        return Layout(degrees=Degrees(data=ranks), recompute=self.recompute)

    @property
    def partitions_model(self) -> bool:
        """Whether a rank keeps only a part of the model. `place` then takes a model without memory for its weights, and
        draws that part (`model.initial_weights`); by default it takes a finished model."""
        return False

    @property
    def batch_chunks(self) -> int:
        """The number of chunks of a batch that one process computes separately. If more than 1, a proof on one rank has
        something to compare."""
        return 1

    @property
    def accelerators(self) -> int:
        """The number of accelerators that one rank computes on, where there are any."""
        return 1

    @property
    def with_fewer(self) -> str:
        """The accelerators that ranks use, and the setting for fewer if there is one, as the end of a sentence."""
        return "each rank takes one"

    @property
    def chained(self) -> str:
        """The setting under which forward must be the model's blocks one after another, if it names them; "" for
        none."""
        return "strategy.recompute" if self.recompute.blocks else ""

    @property
    def servers(self) -> int:
        """The number of servers: the first ranks, which read no samples and compute on CPUs."""
        return 0

    @property
    def sync_batch_norm(self) -> bool | None:
        """Whether the ranks' BatchNorms exchange within the forward."""
        return False

    @property
    def single_process(self) -> bool:
        """Whether the strategy takes one rank only."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether `place` can train a recipe's turns: some parameters are fixed during a forward and backward, and get
        no gradient."""
        return False

    @property
    def may_lose_ranks(self) -> bool:
        """Whether a training continues after an expendable rank dies (`heartbeat.expendable`)."""
        return False

    def not_promised(self, recipe: Recipe) -> str:
        """Why a training differs from one process's by more than rounding, and a comparison that is possible instead: a
        sentence that `paddle-dp verify` prints. "" if they must be equal, which is the default."""
        return ""

    @property
    def compared_by_step(self) -> bool:
        """Whether `paddle-dp verify` compares each step by itself, from the ranks' weights, if a whole training is not
        one process's (`not_promised`)."""
        return False

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError if the recipe cannot be trained with this strategy on `ranks` ranks of `device` ("cpu" or
        "gpu").

        By default, only recipes that no strategy can train are refused. Called before any process starts, and again in
        each process.
        """
        from paddle_dp.checks.preflight import built_without_memory, preflight_check

        preflight_check(recipe, self.layout(ranks), built_without_memory(recipe.build_model))

    def assigned(self, recipe: Recipe, layout: Layout, blocks: Blocks, width: int) -> tuple[Layout, Blocks]:
        """Returns the layout and the weights of each rank, at `width` bytes per exchanged number, where a forward of
        samples decides them; by default both unchanged. Raises DataError if the samples cannot be read."""
        return layout, blocks

    def rank_layers(self, recipe: Recipe, memory: RankMemory) -> list[nn.Layer] | None:
        """Builds the layers of one rank on the CPU; None if the model's `blocks` and `cuts` describe them."""
        return None

    def traffic(self, layout: Layout, blocks: Blocks, wire: Wire | None) -> list[str]:
        """Lines on a step's bytes of each role, and their time over a `wire`, if ranks have roles; by default none."""
        return []

    def build(self, mesh: Mesh) -> Strategy:
        """Prepares this process and returns the strategy on `mesh`. Collective. Raises UsageError for a mesh that does
        not fit."""
        raise NotImplementedError
