"""The contract between a gradient exchange and a learner, on CPUs and on accelerators.

Several exchanges may run concurrently, for different parameters and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol


class CompositeExchange:
    """Several exchanges, each with the indices of its parameters among all. No parameter is in two of them."""

    each_micro_batch = False

    def __init__(self, members: Sequence[tuple[GradientExchange, Sequence[int]]]):
        self._members = [(exchange, sorted(indices)) for exchange, indices in members]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Wraps a micro-batch's backward, `last` of an update."""
        with ExitStack() as stack:
            for exchange, _ in self._members:
                stack.enter_context(exchange.backward(last))
            yield

    def finish(self) -> list[int]:
        """Called after an update's last backward. Returns the indices of parameters without a local gradient.
        Collective."""
        return sorted(indices[index] for exchange, indices in self._members for index in exchange.finish())


class GradientExchange(Protocol):
    """Sums gradients over ranks while backward runs."""

    each_micro_batch: bool
    """Whether gradients are exchanged in every backward, so that only their owners hold them (ZeRO-2)."""

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Wraps a micro-batch's backward, `last` of an update."""
        ...

    def finish(self) -> list[int]:
        """Called after an update's last backward: waits until owners hold the summed gradients, where any rank has one.
        Returns the indices of parameters without a local gradient. Collective."""
        ...
