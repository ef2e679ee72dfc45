"""The learning rate: from the schedule into the optimizer, when it changes."""

from __future__ import annotations

from typing import Any

from paddle.optimizer.lr import LRScheduler, ReduceOnPlateau

from paddle_dp.errors import UsageError


class Rate:
    """Moves `optimizer`'s rate as `schedule` says.

    Paddle's optimizers can hold the schedule themselves; then they ask it, and fill a tensor, at every update, which
    is 60 µs of a small model's step. One that comes so is left so. Raises UsageError for one with another schedule.
    """

    def __init__(self, optimizer: Any, schedule: LRScheduler | None):
        held = getattr(optimizer, "_learning_rate", None)
        self.optimizer, self.schedule = optimizer, schedule
        self._asks, self._now = isinstance(held, LRScheduler), held
        if isinstance(schedule, ReduceOnPlateau):
            raise UsageError(
                "schedule: ReduceOnPlateau waits for a number of the evaluations, and a schedule here moves by updates "
                "alone: take another, such as StepDecay, or cosine in a recipe's words"
            )
        if self._asks and schedule is not held:
            raise UsageError(
                "schedule: the optimizer was made with a schedule of its own, which nobody would move: give one of both"
            )
        self.take()

    def step(self) -> None:
        """One update has been done."""
        if self.schedule is not None:
            self.schedule.step()
            self.take()

    def take(self) -> None:
        """Gives the optimizer the schedule's rate of now."""
        if self.schedule is not None and not self._asks and (rate := self.schedule()) != self._now:
            self.optimizer.set_lr(rate)
            self._now = rate


def check_taken(optimizer: Any, schedule: LRScheduler | None) -> None:
    """Raises UsageError when an optimizer that was made with the schedule's rate has another."""
    if schedule is not None and optimizer.get_lr() != schedule():
        raise UsageError(
            f"optimizer: it was given the schedule's learning rate {schedule()}, and has {optimizer.get_lr()}: take "
            "the rate as it is given, or leave out the schedule"
        )
