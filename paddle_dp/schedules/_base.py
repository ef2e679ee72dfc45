"""What the schedules share: the peak, the way up to it, and scaling by batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.units import Length, Positive, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer.lr import LRScheduler


NONE = Length(0, "steps")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """`learning_rate` × batch / `per_batch`, reached in a straight line from `warmup_from` × peak over `warmup`.

    The line starts just before the first update, so that no update is made at rate 0.
    """

    learning_rate: Rate
    """The peak: the rate behind the warm-up."""

    warmup: Length = NONE
    """How long the rate rises, in a straight line."""

    warmup_from: Probability = 0.0
    """Where the rise begins, as a share of the peak."""

    per_batch: Positive | None = None
    """The peak is for so many samples an update, and scaled with `train.batch`."""

    def rate(self, step: int, *, steps: int, steps_per_epoch: int, batch: int) -> float:
        """The learning rate of update number `step` (from 0) of `steps`, with `batch` samples an update."""
        peak = self.learning_rate * batch / self.per_batch if self.per_batch else self.learning_rate
        start = self.warmup.steps(steps_per_epoch)
        if step < start:
            return peak * (self.warmup_from + (1 - self.warmup_from) * (step + 1) / (start + 1))
        return peak * self.level(step, start=start, steps=steps, steps_per_epoch=steps_per_epoch)

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        """How high, 0 to 1 of the peak, update `step` is; `start` is the end of the warm-up, at or before it."""
        raise NotImplementedError

    def build(self, *, steps: int, steps_per_epoch: int, batch: int) -> LRScheduler:
        """A schedule for `paddle.optimizer`, one `step()` an update; its state is two plain numbers."""
        from paddle.optimizer.lr import LambdaDecay

        def rate(step: int) -> float:
            return float(self.rate(step, steps=steps, steps_per_epoch=steps_per_epoch, batch=batch))

        return LambdaDecay(1.0, rate)


@dataclass(frozen=True, kw_only=True)
class FallingConfig(ScheduleConfig):
    """A rate that falls all the way from the end of the warm-up to the end of training, to `floor` × peak."""

    floor: Probability = 0.0
    """Where the fall ends, as a share of the peak; below 1."""

    def level(self, step: int, *, start: int, steps: int, steps_per_epoch: int) -> float:
        done = min(1.0, (step - start) / max(1, steps - start))
        return self.floor + (1 - self.floor) * self.left(done)

    def left(self, done: float) -> float:
        """What is left of the way down, 1 to 0, when `done`, 0 to 1, of the time is over."""
        raise NotImplementedError
