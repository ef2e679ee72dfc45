"""Detects when a parameter's gradient is final within a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle


class GradReadyHooks:
    """Calls `ready(index, final)` during backward when the gradient of `parameters[index]` has been added to.

    `final`: it has been added to as often as in the previous round, so no more contributions are expected.

    Paddle calls a hook after each addition to `parameter.grad`: once per backward, but with recompute once per inner
    backward, hence twice for a parameter that two recomputed blocks share. `ready` is called at the count of the
    previous round. In the first round and beyond that count it is called each time, not final; below it never. (Paddle
    cannot remove such a hook, so it is registered once, with a switch.)
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], ready: Callable[[int, bool], None]):
        self._ready, self._enabled = ready, False
        self._counts: dict[int, int] = {}  # in this round, by index
        self._expected: dict[int, int] = {}
        for index, parameter in enumerate(parameters):
            parameter._register_backward_hook(partial(self._on_gradient, index))

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Wraps a backward that exchanges gradients."""
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False

    def end(self) -> list[int]:
        """Ends a round's backwards. Returns the indices of parameters with fewer contributions than the round
        before."""
        fewer = [index for index, count in self._counts.items() if count < self._expected.get(index, 0)]
        self._expected.update(self._counts)
        self._counts = {}
        return fewer

    def _on_gradient(self, index: int, *_: Any) -> None:
        if self._enabled:
            self._counts[index] = count = self._counts.get(index, 0) + 1
            expected = self._expected.get(index, 0)
            if count >= expected:
                self._ready(index, count == expected)
