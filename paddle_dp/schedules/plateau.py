"""The peak until a held-out number stops improving, then a factor of it, each time (Paddle's ReduceOnPlateau)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paddle_dp.schedules._base import ScheduleConfig
from paddle_dp.units import Count, Every, Fraction, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer.lr import LRScheduler


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleConfig):
    """The rates of `paddle.optimizer.lr.ReduceOnPlateau` on the same numbers, without its `epsilon`. Evaluations within
    the warm-up do not count; nor do evaluations by callbacks, such as `evaluate`."""

    watch: str = "loss"
    """A number of the evaluations, over all held-out samples, such as `loss`, `acc1` or `ema_loss`."""

    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the number should fall (`min`) or rise (`max`); `auto`: costs (loss, error, …) fall, all others rise."""

    every: Every = Every.parse("1 epoch")
    """How often to evaluate for the schedule. A callback that evaluates at the same step takes this evaluation."""

    factor: Fraction = 0.1
    """Factor of the rate at each plateau; below 1."""

    patience: Count = 10
    """Number of evaluations in a row without improvement that are accepted; one more, and the rate falls."""

    threshold: Rate = 1e-4
    """Difference that an improvement must exceed: a share of the best number, or itself under `threshold_mode: abs`."""

    threshold_mode: Literal["rel", "abs"] = "rel"
    """`rel`: `threshold` is a share of the best number so far; `abs`: a difference from it."""

    cooldown: Count = 0
    """Number of evaluations after a fall that are ignored."""

    floor: Probability = 0.0
    """The lowest rate, as a share of the peak."""

    def __post_init__(self) -> None:
        if self.factor >= 1:
            raise ValueError(f"factor: {self.factor:g} is not below 1: the rate would never fall")

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        return 1.0

    def build(self, *, steps: int, steps_per_epoch: int, batch: int) -> LRScheduler:
        from paddle_dp.core.plateau import Plateau

        def peak(step: int) -> float:
            return float(self.rate(step, steps=steps, steps_per_epoch=steps_per_epoch, batch=batch))

        return Plateau(self, peak, self.warmup.steps(steps_per_epoch))
