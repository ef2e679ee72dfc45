"""A learning rate that falls when a held-out number stops improving: the rules of paddle.optimizer.lr.ReduceOnPlateau.

The trainer makes the evaluations that count, at the schedule's own interval and before any callback evaluates or saves:
other evaluations do not change what is learned, and a checkpoint of a step holds its evaluation. The number is one over
all ranks, equal on each, so all of them decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.optimizer.lr import LRScheduler

from paddle_dp.scores import smaller_is_better
from paddle_dp.units import Every


class Plateau(LRScheduler):
    """The rate `peak(step)` × `share`; `share` begins at 1 and falls by the factor at each plateau.

    `step()` counts updates, as of any schedule; `observe` gets the numbers of an evaluation. Evaluations before update
    number `start`, within the warm-up, do not count. `settings`: the Config of schedules/plateau.py.
    """

    def __init__(self, settings: Any, peak: Callable[[int], float], start: int):
        self.settings, self.peak, self.start = settings, peak, start
        self.share = 1.0
        self.best: float | None = None
        self.bad_evaluations = 0
        self.cooldown_left = 0
        super().__init__(peak(0))

    @property
    def watch(self) -> str:
        """The name of the number, such as loss or acc1."""
        return str(self.settings.watch)

    @property
    def every(self) -> Every:
        """How often the trainer evaluates for this schedule."""
        every: Every = self.settings.every
        return every

    def get_lr(self) -> float:
        return self.peak(self.last_epoch) * self.share

    def state_keys(self) -> None:
        self.keys = ["last_epoch", "last_lr", "share", "best", "bad_evaluations", "cooldown_left"]

    def observe(self, value: float) -> bool:
        """Takes the watched number of an evaluation. Returns whether the rate falls."""
        if self.last_epoch < self.start:
            return False
        if self.cooldown_left > 0:
            self.cooldown_left -= 1
            return False
        if self.best is None or self._improves(value, self.best):
            self.best, self.bad_evaluations = value, 0
        else:
            self.bad_evaluations += 1
        if self.bad_evaluations <= self.settings.patience:
            return False
        self.cooldown_left, self.bad_evaluations = self.settings.cooldown, 0
        before, self.share = self.share, max(self.share * self.settings.factor, self.settings.floor)
        self.last_lr = self.get_lr()
        return self.share < before

    def _improves(self, value: float, best: float) -> bool:
        """Whether `value` is better than `best` by more than the threshold."""
        mode, settings = self.settings.mode, self.settings
        by = settings.threshold * (best if settings.threshold_mode == "rel" else 1.0)
        falls = mode == "min" or (mode == "auto" and smaller_is_better(settings.watch))
        return bool(value < best - by if falls else value > best + by)
