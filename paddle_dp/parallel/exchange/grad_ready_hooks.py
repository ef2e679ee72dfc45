"""When the gradient of a parameter is final in a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import paddle


class GradReadyHooks:
    """Calls `ready(place, final)` in a backward when the gradient of `parameters[place]` is there; `final`: as often as
    in the round before, after which it is not expected again.

    Paddle tells of a gradient when it has been added to `parameter.grad`: once a backward, but with recompute once for
    each inner backward, so that a parameter which two recomputed blocks use, or one inside and outside, is told of
    twice. How often, is learned in the round before: `ready` is called the last time. In the first round, and where a
    parameter is used more often than then, it is called each time, and is not final; where it is used less often, not
    at all. (Paddle cannot take such a hook off, so that it is registered once, with a switch.)
    """

    def __init__(self, parameters: Sequence[paddle.Tensor], ready: Callable[[int, bool], None]):
        self._ready, self._enabled = ready, False
        self._counts: dict[int, int] = {}  # in this round, by index
        self._expected: dict[int, int] = {}
        for index, parameter in enumerate(parameters):
            parameter._register_backward_hook(partial(self._on_gradient, index))

    @contextmanager
    def enabled(self) -> Iterator[None]:
        """Around a backward whose gradients are exchanged."""
        self._enabled = True
        try:
            yield
        finally:
            self._enabled = False

    def end(self) -> list[int]:
        """Returns, after a round's backwards, the indices of parameters with fewer gradients than the round before."""
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
