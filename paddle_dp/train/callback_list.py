"""A training's callbacks: in which order they are called, which of them are due, and what is around their work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from paddle_dp.errors import message_of
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train.callback import Callback, Moment, Name
from paddle_dp.train.overrides import is_overridden, refuse_overrides

if TYPE_CHECKING:
    from paddle_dp.parallel import Learner
    from paddle_dp.train.meter import Meter


class CallbackList:
    """The callbacks of a training of `learner`; `meter` counts the time of those that are no part of training.

    `at_work`: those of a step, an epoch or the end are being called.
    """

    def __init__(self, learner: Learner, meter: Meter):
        self._learner, self._meter = learner, meter
        self._all: tuple[Callback, ...] = ()
        self._of_steps: tuple[Callback, ...] = ()
        self.at_work = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def add(self, callback: Callback) -> None:
        """Raises UsageError unless it is a Callback, or with a method that looks like a moment's and is none."""
        refuse_overrides(callback)
        # At an epoch and at the end, callbacks that work (evaluate, save) come before those that write about it. At a
        # step, after them: metrics must be on disk before the checkpoint of the same step.
        self._all = tuple(sorted([*self._all, callback], key=lambda c: c.reads))
        # Metrics are read only if a callback overrides `step`.
        self._of_steps = tuple(c for c in reversed(self._all) if is_overridden(c, "step"))

    def due_at_step(self, step: int, last: bool) -> list[Callback]:
        """Those whose `step` is called after update `step`. Callbacks that read are called after the `last` one, too;
        the others, which evaluate or save, have `end`."""
        return [c for c in self._of_steps if c.due_at_step(step) or (last and c.reads)]

    def due_at_epoch(self, epochs: int) -> list[Callback]:
        return [callback for callback in self._all if callback.due_at_epoch(epochs)]

    def call(self, name: Name, callbacks: Iterable[Callback], call: Callable[[Callback], None]) -> None:
        """Calls these callbacks, where a training stands still for them: but for `step` of those that read, their time
        does not count."""
        self.at_work = True
        try:
            for callback in callbacks:
                if callback.weights or name != "step":
                    self._learner.settle()
                with (
                    nullcontext() if name == "step" and callback.reads else self._meter.paused(),
                    _within(callback, name),
                ):
                    call(callback)
        finally:
            self.at_work = False

    def tell(self, name: Name, call: Callable[[Callback], None]) -> None:
        """Calls all of them, in the midst of another one's work or before any."""
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
    """Around a callback's work: in the heartbeat it is the callback's, «Evaluate.epoch»."""
    return heartbeat.within("callbacks", f"{type(callback).__name__}.{name}")
