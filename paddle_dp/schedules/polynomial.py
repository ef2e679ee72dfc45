"""A power of the remaining time, from the peak to the floor; power 1 is linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from paddle_dp.schedules._base import FallingConfig


@dataclass(frozen=True, kw_only=True)
class Config(FallingConfig):
    power: Annotated[float, Gt(0)] = 1.0
    """Exponent of the remaining share of the time; 1 is linear."""

    def left(self, done: float) -> float:
        return (1 - done) ** self.power
