"""Ranks learn without waiting for each other, while their weights are averaged in the background (EASGD).

In `elastic_rank`, `ElasticRank` computes a rank's shares, and `ElasticAverage` is the center towards which the
ranks' weights are pulled (Zhang et al. 2015). Ranks that meet after a period are `strategies._rounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.strategies._alone import compared, place_alone, refuse_across, refuse_shared_decisions
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.strategies._rounds import AveragedLayout
from paddle_dp.units import EverySteps, Fraction, Positive, check_steps

if TYPE_CHECKING:
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    staleness: Positive = 4
    """Updates that a rank may make between sending its weights and applying the center's pull; after them it waits."""

    every: EverySteps = EverySteps(4, "steps")
    """Local updates, of one share each, between two exchanges of a rank with the center."""

    moving_rate: Fraction = 0.9
    """β of EASGD: in an exchange a rank and the center move towards each other by β / ranks of their distance."""

    def __post_init__(self) -> None:
        check_steps(every=self.every)

    def layout(self, ranks: int) -> AveragedLayout:
        return AveragedLayout(
            degrees=Degrees(data=ranks), recompute=self.recompute, every=int(self.every.count), asynchronous=True,
            copies=2 + 1 / ranks,  # the round's start, the message under way, and a part of the center
        )  # fmt: skip

    def not_promised(self, recipe: Recipe) -> str:
        return (
            "strategy async_average promises no other run's result, not even that of the same command again: which "
            "rank learns from which samples, and when weights meet, depends on time. Compare held-out numbers of "
            "whole trainings (docs/local-sgd.md)."
        )

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        refuse_shared_decisions(recipe, "async_average")
        if recipe.guard.non_finite is not None:
            raise UsageError(
                "strategy async_average: guard.non_finite lets all ranks judge each update together: leave it out, or "
                "take local_sgd. A loss that is not finite ends the training where it is read."
            )
        if recipe.dataset.reading == "scatter" and ranks > 1:
            raise UsageError(
                "dataset.reading=scatter: rank 0 sends each rank its share of a batch, and under async_average ranks "
                "take shares as they come to them: set dataset.reading=each."
            )
        refuse_across(compared(recipe), ranks)
        super().refuse(recipe, ranks, device)

    def build(self, mesh: Mesh) -> AsyncAverage:
        return AsyncAverage(self, mesh)


@dataclass(frozen=True)
class AsyncAverage:
    """Places a whole model on all ranks of the mesh."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """Returns a learner with bit-equal weights on all ranks; raises DivergenceError if they differ. Collective."""
        from paddle_dp.strategies._rounds.periods import Periods
        from paddle_dp.strategies.async_average.elastic_rank import ElasticMeans, ElasticRank

        config = self.config
        periods = Periods(int(config.every.count))
        weights = partial(ElasticMeans, periods=periods, optimizer_states="averaged")
        known = ["each rank learns from the shares that it comes to, and weights are averaged meanwhile"]
        learner = place_alone(task, self.mesh, config.recompute, weights, known)
        assert isinstance(learner.weights, ElasticMeans)
        learner.async_rank = ElasticRank(learner, learner.weights, config.staleness, config.moving_rate)
        learner.check("after the weights were made equal")
        return learner
