"""Sets the schedule's learning rate in the optimizer whenever it changes."""

from __future__ import annotations

from paddle.optimizer import Optimizer
from paddle.optimizer.lr import LRScheduler, ReduceOnPlateau

from paddle_dp.errors import UsageError


class Rate:
    """Steps `schedule` and sets its rate in `optimizer`.

    An optimizer built with the scheduler itself is used unchanged: it reads the rate and fills a tensor at every
    update, for 60 µs, which other optimizers save. Raises UsageError for an optimizer with another scheduler than
    `schedule`, and for ReduceOnPlateau.
    """

    def __init__(self, optimizer: Optimizer, schedule: LRScheduler | None):
        self.steps = 0  # updates so far, including those before a resume
        current = optimizer._learning_rate
        self.optimizer, self.schedule = optimizer, schedule
        self._has_scheduler, self._current = isinstance(current, LRScheduler), current
        if isinstance(schedule, ReduceOnPlateau):
            raise UsageError(
                "schedule: ReduceOnPlateau needs a metric at each step, and schedules here are stepped by updates "
                "alone: use another one, such as StepDecay, or a recipe's cosine"
            )
        if self._has_scheduler and schedule is not current:
            raise UsageError(
                "schedule: the optimizer has another scheduler, which would not be stepped: give one of the two"
            )
        self.apply()

    def step(self) -> None:
        """Call it after each update."""
        self.steps += 1
        if self.schedule is not None:
            self.schedule.step()
            self.apply()

    def apply(self) -> None:
        """Sets the schedule's current rate in the optimizer."""
        if self.schedule is None or self._has_scheduler:
            return
        if (rate := self.schedule()) != self._current:
            self.optimizer.set_lr(rate)
            self._current = rate


def check_rate(optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    """Raises UsageError if an optimizer does not have the schedule's rate, with which it was to be built."""
    if schedule is not None and optimizer.get_lr() != schedule():
        raise UsageError(
            f"optimizer: it was given the schedule's learning rate {schedule()}, but has {optimizer.get_lr()}: build "
            "it with the rate that it is given, or leave out the schedule"
        )
