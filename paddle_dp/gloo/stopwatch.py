"""Measures how long this rank spends in exchanges along each axis.

On a CPU collectives are synchronous: the time in the call is the time of the exchange, including the wait for slower
peers. The stopwatch observes the bridge's functions and messages; without one, no time is measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle_dp.gloo import originals
from paddle_dp.mesh.degrees import AXES, Degrees
from paddle_dp.mesh.transport import observers

MULTIPLE_AXES = "several axes"  # the gradient norm, comparisons of weights


class Stopwatch:
    """Seconds by axis since the last `read`. Nested exchanges count once."""

    def __init__(self, degrees: Degrees):
        self.degrees, self._inside = degrees, False
        self._spent: dict[str, float] = {}
        self._axes: dict[int, str] = {}  # by group id

    def read(self) -> dict[str, float]:
        """Returns the seconds spent on each axis since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def axis(self, group: Any) -> str:
        """Returns the axis of a Group; MULTIPLE_AXES for one across several."""
        if group.id not in self._axes:
            self._axes[group.id] = axis_of(self.degrees, group.ranks)
        return self._axes[group.id]

    @contextmanager
    def around(self, group: Any) -> Iterator[None]:
        """Times an exchange along `group` and adds it to the group's axis."""
        if self._inside:
            yield
            return
        self._inside, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._inside, axis = False, self.axis(group)
            self._spent[axis] = self._spent.get(axis, 0.0) + time.perf_counter() - began


def axis_of(degrees: Degrees, ranks: list[int]) -> str:
    """Returns the axis on which these ranks differ; MULTIPLE_AXES for several, "" for a single rank."""
    coords = [degrees.coords(rank) for rank in ranks]
    differing = [axis for axis in AXES if len({each[axis] for each in coords}) > 1]
    return MULTIPLE_AXES if len(differing) > 1 else "".join(differing)


def axes_timed(degrees: Degrees) -> list[str]:
    """Returns the possible keys of `Stopwatch.read`: each axis that is split, and MULTIPLE_AXES if several are."""
    split = [axis for axis in AXES if degrees[axis] > 1]
    return [*split, MULTIPLE_AXES] if len(split) > 1 else split


def start(degrees: Degrees) -> Stopwatch | None:
    """Starts a stopwatch that measures every later exchange; returns None if the bridge is not installed."""
    if not originals.is_installed():
        return None
    watch = Stopwatch(degrees)
    observers.append(watch.around)
    return watch
