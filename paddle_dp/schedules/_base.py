"""The base of the schedules: the peak, the warm-up, and scaling with the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.units import Length, Positive, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer.lr import LRScheduler


NO_WARMUP = Length(0, "steps")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The peak is `learning_rate` × batch / `per_batch`; the rate rises to it linearly from `warmup_from` × peak.

    The rise starts one step before the first update, so that no update has rate 0.
    """

    learning_rate: Rate
    """The peak: the rate after the warm-up."""

    warmup: Length = NO_WARMUP
    """Length of the warm-up, in which the rate rises linearly."""

    warmup_from: Probability = 0.0
    """Start of the warm-up, as a share of the peak."""

    per_batch: Positive | None = None
    """Batch size to which `learning_rate` belongs; the peak is scaled to `train.batch`."""

    def rate(self, step: int, *, steps: int, steps_per_epoch: int, batch: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`, with `batch` samples per update."""
        peak = self.learning_rate * batch / self.per_batch if self.per_batch else self.learning_rate
        start = self.warmup.steps(steps_per_epoch)
        if step < start:
            return peak * (self.warmup_from + (1 - self.warmup_from) * (step + 1) / (start + 1))
        return peak * self.level(step, start=start, steps=steps, steps_per_epoch=steps_per_epoch)

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        """The rate of update `step`, as a share of the peak; `start` is the first update after the warm-up."""
        raise NotImplementedError

    def build(self, *, steps: int, steps_per_epoch: int, batch: int) -> LRScheduler:
        """A `paddle.optimizer.lr` schedule, with one `step()` per update; its state is two numbers."""
        from paddle.optimizer.lr import LambdaDecay

        def rate(step: int) -> float:
            return float(self.rate(step, steps=steps, steps_per_epoch=steps_per_epoch, batch=batch))

        return LambdaDecay(1.0, rate)


@dataclass(frozen=True, kw_only=True)
class FallingConfig(ScheduleConfig):
    """A rate that falls until the end of training, down to `floor` × peak; from the end of the warm-up on, or later."""

    floor: Probability = 0.0
    """Rate at the end, as a share of the peak; below 1."""

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        first = self.fall(start, steps)
        done = min(1.0, max(0, step - first) / max(1, steps - first))
        return self.floor + (1 - self.floor) * self.left(done)

    def fall(self, start: int, steps: int) -> int:
        """The last update at the peak; `start`: the first one after the warm-up."""
        return start

    def left(self, done: float) -> float:
        """The remaining share of the fall, 1 to 0, after the share `done` (0 to 1) of the updates."""
        raise NotImplementedError
