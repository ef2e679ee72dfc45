"""How long this rank has spent in exchanges, axis by axis.

On a CPU a collective returns when it is through: the time in the call is the time of the exchange, waiting for slower
peers included. Nothing is touched until it is asked for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from paddle_dp.gloo import originals, transport
from paddle_dp.gloo.patch import look_up
from paddle_dp.mesh.degrees import AXES, Degrees

GLOO = "paddle.base.core.ProcessGroupGloo"
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_partial", "all_to_all", "all_to_all_single",
    "all_to_all_tensor", "barrier", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_tensor",
)  # fmt: skip
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

    def timed(self, kept: Callable[..., Any], group: Callable[..., Any]) -> Callable[..., Any]:
        """`kept`, with the time in it put down to the axis of the group that `group` finds in its arguments."""

        @functools.wraps(kept)
        def ours(*args: Any, **named: Any) -> Any:
            if self._inside:
                return kept(*args, **named)
            self._inside, began = True, time.perf_counter()
            try:
                return kept(*args, **named)
            finally:
                self._inside, axis = False, self.axis(group(*args))
                self._spent[axis] = self._spent.get(axis, 0.0) + time.perf_counter() - began

        return ours


def axis_of(degrees: Degrees, ranks: list[int]) -> str:
    """The axis on which these ranks have different seats; SEVERAL for more than one, "" for a single rank."""
    seats = [degrees.seats(rank) for rank in ranks]
    apart = [axis for axis in AXES if len({seat[axis] for seat in seats}) > 1]
    return SEVERAL if len(apart) > 1 else "".join(apart)


def words(degrees: Degrees) -> list[str]:
    """What time can be put down to: each axis that is split, and SEVERAL if more than one is."""
    split = [axis for axis in AXES if degrees[axis] > 1]
    return [*split, SEVERAL] if len(split) > 1 else split


def start(degrees: Degrees) -> Stopwatch | None:
    """Begins to measure every exchange that goes through the bridge; None where the bridge is not installed."""
    gloo = look_up(GLOO)
    if not originals._own or gloo is None:
        return None
    watch = Stopwatch(degrees)

    def of_group(process_group: Any, *_: Any) -> Any:
        return originals.group_of(process_group)

    for name in [word + twin for word in COLLECTIVES for twin in ("", "_on_calc_stream")]:
        if hasattr(gloo, name):
            setattr(gloo, name, watch.timed(getattr(gloo, name), of_group))
    for name in set(originals._own) - {"create"}:  # the bridge's own layers call these by themselves
        originals._own[name] = watch.timed(originals._own[name], of_group)
    transport.Carrier.take = watch.timed(transport.Carrier.take, _of_message)  # type: ignore[method-assign]
    return watch


def _of_message(_: Any, group: int, __: int) -> Any:
    from paddle.distributed import collective

    return collective._get_group_map()[group]
