"""One cycle: up to the peak and down to almost nothing (Smith and Topin, arXiv:1708.07120; momentum stays)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from paddle_dp.schedules._base import ScheduleConfig
from paddle_dp.units import Fraction, Probability


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleConfig):
    """The rates of `paddle.optimizer.lr.OneCycleLR` and PyTorch's; the last update has the rate `floor` × peak."""

    rise: Fraction = 0.3
    """Part of all updates in which the rate rises."""

    start: Probability = 0.04
    """Rate of the first update, as a share of the peak."""

    floor: Probability = 4e-6
    """Rate of the last update, as a share of the peak."""

    shape: Literal["cosine", "linear"] = "cosine"
    """Shape of rise and fall."""

    def __post_init__(self) -> None:
        if self.warmup.count or self.warmup_from:
            raise ValueError("warmup: one_cycle rises by itself: set rise and start in its place")

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        top = max(self.rise * steps - 1, 0.0)
        if step < top:
            return self._between(self.start, 1.0, step / top)
        return self._between(1.0, self.floor, min(1.0, (step - top) / max(steps - 1 - top, 1.0)))

    def _between(self, first: float, last: float, done: float) -> float:
        share = done if self.shape == "linear" else (1 - cos(pi * done)) / 2
        return first + (last - first) * share
