"""When the buckets of paddle.DataParallel's reducer are full, for a film: the reducer itself, in C++, tells nothing.

Which gradients are in which bucket the wrapper knows (`group_indices`). Paddle calls a hook of ours in front of each
gradient that is added to its parameter, and one behind it, and behind the reducer's own, which was registered before.
A bucket is full with its last gradient, and the reducer hands buckets over in their order, none before those in front
of it: what lies between the two hooks is its call, which may hand over several. Over gloo that is the whole all-reduce,
on an accelerator its launch.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import paddle

from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel.exchange.buckets import called
from paddle_dp.parallel.exchange.memory import nbytes


class ReducerBuckets:
    """Tells the heartbeat's tape of each bucket of a wrapper, in backwards that exchange."""

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
        """In front of a backward."""
        self._here: set[int] = set()  # places of gradients
        self._next = 0  # the bucket that leaves next
        self._began = 0.0

    def _arrives(self, index: int, gradient: Any) -> None:
        if heartbeat.tape is None or not self._wrapper.grad_need_sync:
            return
        if self._here.union({index}) == self._all:
            heartbeat.tape.computed()  # the last one: nothing but its exchange is left to do
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
    """The parameters whose gradients the wrapper's reducer exchanges, in the order of its numbers."""
    tensors = {
        id(parameter): parameter
        for layer in wrapper.sublayers()
        for parameter in layer.parameters(include_sublayers=False)
        if parameter.trainable and not getattr(parameter, "no_sync", False)
    }
    return list(tensors.values())
