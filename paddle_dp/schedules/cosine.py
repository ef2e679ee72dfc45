"""Half a cosine from the peak to the floor (Loshchilov and Hutter, arXiv:1608.03983; no restarts)."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

from paddle_dp.schedules._base import FallingConfig


@dataclass(frozen=True, kw_only=True)
class Config(FallingConfig):
    def left(self, done: float) -> float:
        return (1 + cos(pi * done)) / 2
