"""A constant rate after the warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.schedules._base import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleConfig):
    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        return 1.0
