"""How long this rank has spent in exchanges, axis by axis.

On a CPU a collective returns when it is through: the time in the call is the time of the exchange, waiting for slower
peers included. It is an observer of the bridge's own functions: until one is asked for, nobody looks at a clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle_dp.gloo import originals
from paddle_dp.mesh.degrees import AXES, Degrees

SEVERAL = "several axes"  # the gradient norm, comparisons of weights


class Stopwatch:
    """Seconds by axis since the last reading. Exchanges within exchanges count once."""

    def __init__(self, degrees: Degrees):
        self.degrees, self._inside = degrees, False
        self._spent: dict[str, float] = {}
        self._axes: dict[int, str] = {}  # of each group, by its id

    def read(self) -> dict[str, float]:
        """The seconds spent on each axis, and begins anew."""
        spent, self._spent = self._spent, {}
        return spent

    def axis(self, group: Any) -> str:
        """The axis along which a Group's ranks lie; SEVERAL for a group across more than one."""
        if group.id not in self._axes:
            self._axes[group.id] = axis_of(self.degrees, group.ranks)
        return self._axes[group.id]

    @contextmanager
    def around(self, group: Any) -> Iterator[None]:
        """An exchange along `group`: the time in it is put down to the axis on which the group's ranks lie."""
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
    """The axis on which these ranks differ; SEVERAL for more than one, "" for a single rank."""
    coords = [degrees.coords(rank) for rank in ranks]
    apart = [axis for axis in AXES if len({each[axis] for each in coords}) > 1]
    return SEVERAL if len(apart) > 1 else "".join(apart)


def words(degrees: Degrees) -> list[str]:
    """What time can be put down to: each axis that is split, and SEVERAL if more than one is."""
    split = [axis for axis in AXES if degrees[axis] > 1]
    return [*split, SEVERAL] if len(split) > 1 else split


def start(degrees: Degrees) -> Stopwatch | None:
    """Begins to measure every exchange that goes through the bridge; None where the bridge is not installed."""
    if not originals.kept():
        return None
    watch = Stopwatch(degrees)
    originals.observers.append(watch.around)
    return watch
