"""Warm-up, stable, decay: the peak until the last part of the training (Hu et al., arXiv:2404.06395)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paddle_dp.schedules._base import FallingConfig
from paddle_dp.units import Fraction


@dataclass(frozen=True, kw_only=True)
class Config(FallingConfig):
    decay: Fraction = 0.2
    """Part of all updates at the end in which the rate falls."""

    shape: Literal["linear", "1-sqrt"] = "linear"
    """Shape of the fall: linear, or 1 - √ of its passed share (Hägele et al., arXiv:2405.18392)."""

    def fall(self, start: int, steps: int) -> int:
        """The last update before the decay. In both papers the rate falls at every step s > T, and the first
        one's f(s - T) stays above 0: so all n updates of `decay` are below the peak, by 1 to n times 1 / (n + 1), and
        none has rate 0. After a warm-up that lasts into `decay` one update is at the peak."""
        return max(start, steps - round(self.decay * steps) - 1)

    def left(self, done: float) -> float:
        return 1 - (done if self.shape == "linear" else done**0.5)
