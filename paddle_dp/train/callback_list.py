"""The callbacks of a training, and how they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from paddle_dp.errors import message_of
from paddle_dp.learner import Learner
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train.callback import Callback, Moment, Name
from paddle_dp.train.meter import Meter
from paddle_dp.train.overrides import is_overridden, refuse_overrides


class CallbackList:
    """The callbacks of a training of `learner`; `meter` excludes the time of those that are no part of training.

    `at_work`: whether callbacks of a step, an epoch or the end are being called.
    """

    def __init__(self, learner: Learner, meter: Meter):
        self._learner, self._meter = learner, meter
        self._all: tuple[Callback, ...] = ()
        self._step_callbacks: tuple[Callback, ...] = ()
        self.at_work = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def add(self, callback: Callback) -> None:
        """Adds a callback. Raises UsageError unless it is a Callback, and for a method that looks like a moment's and
        is none."""
        refuse_overrides(callback)
        # At an epoch and at the end, callbacks that work (evaluate, save) precede those that report it. At a step they
        # follow them: metrics must be on disk before the checkpoint of the same step.
        self._all = tuple(sorted([*self._all, callback], key=lambda c: c.reads))
        # Metrics are read only if a callback overrides `step`.
        self._step_callbacks = tuple(c for c in reversed(self._all) if is_overridden(c, "step"))

    def due_at_step(self, step: int, last: bool) -> list[Callback]:
        """The callbacks that are due after update `step`. Callbacks that read are due after the `last` one, too; the
        others, which evaluate or save, have `end`."""
        return [c for c in self._step_callbacks if c.due_at_step(step) or (last and c.reads)]

    def due_at_epoch(self, epochs: int) -> list[Callback]:
        return [callback for callback in self._all if callback.due_at_epoch(epochs)]

    def call(self, name: Name, callbacks: Iterable[Callback], call: Callable[[Callback], None]) -> None:
        """Calls these callbacks while the training stands still. Their time does not count, except `step` of callbacks
        that read."""
        self.at_work = True
        try:
            for callback in callbacks:
                if callback.weights or name != "step":
                    self._learner.weights.wait()
                with (
                    nullcontext() if name == "step" and callback.reads else self._meter.paused(),
                    _within(callback, name),
                ):
                    call(callback)
        finally:
            self.at_work = False

    def tell(self, name: Name, call: Callable[[Callback], None]) -> None:
        """Calls all callbacks, within another one's work or before any."""
        for callback in self._all:
            with _within(callback, name):
                call(callback)

    def tell_failed(self, moment: Moment, error: BaseException) -> None:
        """Calls `failed` of all callbacks, which close their files. An error there must not hide the first."""
        for callback in self._all:
            try:
                callback.failed(moment, error)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if sys.version_info >= (3, 11):
                    error.add_note(f"({type(callback).__name__} failed too: {message_of(second)})")


def _within(callback: Callback, name: Name) -> AbstractContextManager[None]:
    """Marks time in the heartbeat as this callback's work, «Evaluate.epoch»."""
    return heartbeat.within("callbacks", f"{type(callback).__name__}.{name}")
