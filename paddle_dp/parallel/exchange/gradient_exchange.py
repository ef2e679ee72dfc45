"""The contract of a gradient exchange with a learner, on CPUs and on accelerators.

Exchanges may run side by side: some parameters' among these ranks, others' among those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol


class CompositeExchange:
    """Exchanges, each with the places of its parameters among all. No parameter is in two of them."""

    each_micro_batch = False

    def __init__(self, members: Sequence[tuple[GradientExchange, Sequence[int]]]):
        self._members = [(exchange, sorted(indices)) for exchange, indices in members]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward, `last` of an update."""
        with ExitStack() as stack:
            for exchange, _ in self._members:
                stack.enter_context(exchange.backward(last))
            yield

    def finish(self) -> list[int]:
        """After an update's last backward. Returns the places of which this rank had no gradient. Collective."""
        return sorted(indices[index] for exchange, indices in self._members for index in exchange.finish())


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
