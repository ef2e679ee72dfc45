"""Exchanges of gradients side by side: some parameters' among these ranks, others' among those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from paddle_dp.parallel.exchange.gradient_exchange import GradientExchange


class Several:
    """Exchanges, each with the places of its parameters among all. No parameter is in two of them."""

    each_micro_batch = False

    def __init__(self, parts: Sequence[tuple[GradientExchange, Sequence[int]]]):
        self._parts = [(exchange, sorted(places)) for exchange, places in parts]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward, `last` of an update."""
        with ExitStack() as stack:
            for exchange, _ in self._parts:
                stack.enter_context(exchange.backward(last))
            yield

    def finish(self) -> list[int]:
        """After an update's last backward. Returns the places of which this rank had no gradient. Collective."""
        return sorted(places[place] for exchange, places in self._parts for place in exchange.finish())
