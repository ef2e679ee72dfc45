"""The contract of a strategy: the base of each one's Config, with the defaults of plain data parallelism.

A strategy is asked three times. Before a process starts, `refuse` may say no to a recipe, and `layout` says how a
model will lie on so many ranks: the launcher, `paddle-dp check`, the forecast of memory and callbacks ask, and nobody
needs to know which settings a strategy has. In each rank, `build` starts what the layout needs (process groups) and
returns the placer (`parallel.Strategy`), whose `mesh` is split over the layout's axes; loaders and random numbers are
made for that mesh. Then the placer's `place(task)` gives the learner, finished. `check_every` says how often the
trainer compares the ranks' weights.
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
    """What backward computes again instead of keeping it: less memory, more time."""

    check_every: Every | None = Every.parse("100 steps")
    """How often all weights are compared over the ranks that hold the same, bit by bit, and looked at for numbers
    that are not finite; null: at the start, the end and saves only."""

    def layout(self, ranks: int) -> Layout:
        """How a model lies on `ranks` ranks: whole on each, unless a strategy says otherwise."""
        return Layout(degrees=Degrees(data=ranks), recompute=self.recompute)

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        """Raises UsageError where the recipe cannot be trained so on `ranks` ranks of "cpu" or "gpu". Nothing is
        refused, unless a strategy says otherwise. Asked before any process starts, and again in each."""

    def build(self, mesh: Mesh) -> Strategy:
        """What places models in this process. Collective. Raises UsageError for ranks that it is not for."""
        raise NotImplementedError
