"""What the exchange of gradients is to a learner, on CPUs and on accelerators."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


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
