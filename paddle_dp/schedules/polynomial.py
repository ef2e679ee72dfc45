"""A power of the time that is left, from the peak down to the floor; power 1 is a straight line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from paddle_dp.schedules._base import FallingConfig


@dataclass(frozen=True, kw_only=True)
class Config(FallingConfig):
    power: Annotated[float, Gt(0)] = 1.0
    """1 is a straight line."""

    def left(self, done: float) -> float:
        return (1 - done) ** self.power
