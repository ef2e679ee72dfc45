"""A power of the remaining time, from the peak to the floor; power 1 is linear."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.schedules._base import FallingConfig
from paddle_dp.units import AboveZero


@dataclass(frozen=True, kw_only=True)
class Config(FallingConfig):
    power: AboveZero = 1.0
    """Exponent of the remaining share of the time; 1 is linear."""

    def left(self, done: float) -> float:
        return (1 - done) ** self.power
