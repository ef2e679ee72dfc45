"""Records on a timeline when the buckets of paddle.DataParallel's reducer are full; the C++ reducer reports nothing.

Paddle calls one hook of ours before a gradient is added to its parameter, and one after it and after the reducer's
hook, which was registered earlier. The reducer hands over a full bucket (`group_indices`) after all earlier ones. So
the time between the two hooks is its call, for one or several buckets: over gloo the whole all-reduce, on an
accelerator its launch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import paddle

from paddle_dp.exchange.buckets import called
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.tensors import nbytes


class ReducerBuckets:
    """Reports each bucket of a wrapper to the heartbeat's tape, in backwards that exchange."""

    def __init__(self, wrapper: paddle.DataParallel):
        self._wrapper = wrapper
        parameters = reduced(wrapper)
        self.buckets: list[tuple[int, ...]] = [tuple(indices) for indices in reversed(wrapper.group_indices)]
        self._all = set(range(len(parameters)))
        self._bytes = [sum(nbytes(parameters[index]) for index in indices) for indices in self.buckets]
        self._handles = [p.register_hook(partial(self._arrives, index)) for index, p in enumerate(parameters)]
        for index, parameter in enumerate(parameters):
            parameter._register_backward_hook(partial(self._added, index))
        self.begin()

    def begin(self) -> None:
        """Call it before a backward."""
        self._here: set[int] = set()  # indices of gradients
        self._next = 0  # the bucket that leaves next
        self._began = 0.0

    def _arrives(self, index: int, gradient: Any) -> None:
        if heartbeat.tape is None or not self._wrapper.grad_need_sync:
            return
        if self._here.union({index}) == self._all:
            heartbeat.tape.computed()  # after the last gradient only its exchange remains
        self._began = time.monotonic()

    def _added(self, index: int, *_: Any) -> None:
        if heartbeat.tape is None or not self._wrapper.grad_need_sync:
            return
        self._here.add(index)
        first = self._next
        while self._next < len(self.buckets) and self._here.issuperset(self.buckets[self._next]):
            self._next += 1
        if self._next > first:
            size = sum(self._bytes[first : self._next])
            heartbeat.tape.hand_over(called(first, size, self._next - 1), self._began)
        if self._next == len(self.buckets):
            self.begin()


def reduced(wrapper: paddle.DataParallel) -> list[paddle.Tensor]:
    """The parameters with gradients that the wrapper's reducer exchanges, in its order."""
    tensors = {
        id(parameter): parameter
        for layer in wrapper.sublayers()
        for parameter in layer.parameters(include_sublayers=False)
        if parameter.trainable and not getattr(parameter, "no_sync", False)
    }
    return list(tensors.values())
