"""What the exchange of gradients is to a learner, on CPUs and on accelerators; and among which ranks it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from paddle_dp.mesh.degrees import Degrees


class GradientExchange(Protocol):
    """Sums gradients over ranks while backward runs."""

    each_micro_batch: bool
    """Whether gradients are exchanged in every backward, so that only who keeps one holds it (ZeRO-2)."""

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro-batch's backward, `last` of an update."""
        ...

    def finish(self) -> list[int]:
        """After an update's last backward: who keeps a gradient has its sum, where any rank has one. Returns the places
        of parameters of which this rank had none. Collective."""
        ...


def among(degrees: Degrees, rank: int, *axes: str) -> list[int]:
    """The ranks that differ from `rank` on no other than these axes, in order, including itself."""
    me = degrees.coords(rank)
    return [
        other
        for other in range(degrees.ranks)
        if all(place == me[axis] for axis, place in degrees.coords(other).items() if axis not in axes)
    ]
