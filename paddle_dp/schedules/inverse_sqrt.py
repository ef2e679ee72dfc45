"""Falls with the inverse square root of the updates (Vaswani et al., arXiv:1706.03762; T5, arXiv:1910.10683)."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_dp.schedules._base import NO_WARMUP, ScheduleConfig
from paddle_dp.units import Length


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleConfig):
    """peak × √(n / (step + 1)), with n the first update at the peak; the training's length has no influence."""

    hold: Length = NO_WARMUP
    """How long the peak lasts before the rate falls: T5 has no warm-up and holds for 10,000 updates."""

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        last = start + self.hold.steps(steps_per_epoch)  # the last update at the peak
        return float(((last + 1) / max(step + 1, last + 1)) ** 0.5)
