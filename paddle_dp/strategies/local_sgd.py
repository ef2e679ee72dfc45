"""Local SGD and DiLoCo: each rank updates local weights for some steps, then all take the mean of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.strategies._alone import compared, place_alone, refuse_across, refuse_shared_decisions
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.strategies._rounds import AveragedLayout
from paddle_dp.units import AboveZero, EverySteps, Probability, Steps, check_steps

if TYPE_CHECKING:
    from paddle_dp.learner import Learner, Task
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The optimizer that uses the ranks' mean step as its gradient (DiLoCo, Douillard et al. 2023)."""

    use: Literal["momentum"] = "momentum"
    """Gradient descent with momentum."""

    learning_rate: AboveZero = 0.7
    """1 without momentum gives the plain mean."""

    momentum: Probability = 0.9
    """Decay of the velocity, which checkpoints hold."""

    nesterov: bool = True
    """Nesterov momentum."""


@dataclass(frozen=True, kw_only=True)
class Config(StrategyConfig):
    every: EverySteps = EverySteps(8, "steps")
    """Steps between means of the ranks' weights, in which each rank counts by its samples. With 1 and plain gradient
    descent this is data parallelism."""

    warmup: Steps = Steps(0, "steps")
    """The number of first steps that are computed as under data_parallel, with the same bits."""

    adaptive: bool = False
    """A period that begins at learning rate r lasts every · sqrt(highest rate so far / r) steps, 8 · every at most."""

    optimizer_states: Literal["local", "averaged"] = "local"
    """Whether each rank continues with its local optimizer states or with their mean, which sends two to three times as
    much."""

    outer: Outer | None = None
    """An optimizer that steps by the ranks' mean movement instead of taking the mean; with momentum, DiLoCo. `{}` is
    `{use: momentum, learning_rate: 0.7, momentum: 0.9, nesterov: true}`."""

    def __post_init__(self) -> None:
        check_steps(every=self.every, warmup=self.warmup)

    @property
    def is_data_parallel(self) -> bool:
        """Whether weights are averaged after every step, without outer optimizer or adaptive periods."""
        return self.every.count == 1 and self.outer is None and not self.adaptive

    def layout(self, ranks: int) -> AveragedLayout:
        return AveragedLayout(
            degrees=Degrees(data=ranks), recompute=self.recompute, every=int(self.every.count),
            states=self.optimizer_states == "averaged",
            copies=1 + (self.outer is not None),  # the weights at the period's start, and the velocity
        )  # fmt: skip

    def not_promised(self, recipe: Recipe) -> str:
        linear = {"sgd"} | ({"momentum"} if self.optimizer_states == "averaged" else set())
        clips = recipe.optimizer.settings.get("clip") or recipe.optimizer.settings.get("clip_value")
        if self.is_data_parallel and recipe.optimizer.name in linear and not clips:
            return ""
        if not self.is_data_parallel:
            cause = f"between means, every {int(self.every.count)} steps, each rank learns from its own samples alone"
            if self.every.count == 1:
                cause = "the outer optimizer makes other steps than one process"
        elif clips:
            cause = "each rank clips the gradient of its share"
        else:
            cause = (
                f"{recipe.optimizer.name} makes another step of a mean gradient than the mean of its steps"
            )
        return (
            f"strategy local_sgd does not promise one process's result: {cause}. It is promised, and compared, for "
            "strategy.every='1 step' with optimizer sgd without clip (momentum, too, with "
            "strategy.optimizer_states=averaged). Otherwise compare held-out numbers of whole trainings "
            "(docs/local-sgd.md)."
        )

    def refuse(self, recipe: Recipe, ranks: int, device: str = "cpu") -> None:
        refuse_shared_decisions(recipe, "local_sgd")
        refuse_across(compared(recipe), ranks)
        super().refuse(recipe, ranks, device)

    def build(self, mesh: Mesh) -> LocalSGD:
        return LocalSGD(self, mesh)


@dataclass(frozen=True)
class LocalSGD:
    """Places a whole model on all ranks of the mesh."""

    config: Config
    mesh: Mesh

    def place(self, task: Task) -> Learner:
        """Returns a learner with bit-equal weights on all ranks; raises DivergenceError if they differ. Collective."""
        from paddle_dp.strategies._rounds.periodic_means import OuterMomentum, PeriodicMeans
        from paddle_dp.strategies._rounds.periods import Periods

        config, outer = self.config, self.config.outer
        every, known_differences = int(config.every.count), []
        if not config.is_data_parallel:
            known_differences = [
                f"each rank learns from its own samples alone, and weights are averaged every {every} steps"
            ]
        weights = partial(
            PeriodicMeans, periods=Periods(every, int(config.warmup.count), config.adaptive),
            outer=None if outer is None else OuterMomentum(
                learning_rate=outer.learning_rate, momentum=outer.momentum, nesterov=outer.nesterov
            ),
            optimizer_states=config.optimizer_states,
        )  # fmt: skip
        learner = place_alone(task, self.mesh, config.recompute, weights, known_differences)
        learner.check("after the weights were made equal")
        return learner
