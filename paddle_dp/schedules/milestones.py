"""A rate that is multiplied by a factor at each milestone, as in the classic ImageNet schedule."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.schedules._base import ScheduleConfig
from paddle_dp.units import Fraction, Length


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleConfig):
    milestones: tuple[Length, ...]
    """The times of the falls, such as [30 epochs, 60 epochs], from the start of training, warm-up included."""

    factor: Fraction = 0.1
    """Factor of the rate at each milestone."""

    def __post_init__(self) -> None:
        if not self.milestones:
            raise ValueError("milestones: give one or more, like [30 epochs, 60 epochs]; constant has none")

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        passed = sum(step >= milestone.steps(steps_per_epoch) for milestone in self.milestones)
        return self.factor**passed
