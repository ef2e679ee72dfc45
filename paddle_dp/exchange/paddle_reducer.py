"""The exchange of gradients by paddle.DataParallel's reducer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import paddle

from paddle_dp.core.loss import Count
from paddle_dp.core.precision import NOTHING
from paddle_dp.errors import DivergenceError
from paddle_dp.exchange.buckets import called
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.transport import traffic
from paddle_dp.tensors import nbytes

# Records on a timeline when the buckets of paddle.DataParallel's reducer are full; the C++ reducer reports nothing ----


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


_UNUSED = (
    "a parameter that was used before is not used in this forward, on this rank at least, and paddle.DataParallel "
    "waits for its gradient. Set strategy.find_unused_parameters=true, or use every parameter in every forward."
)


class PaddleReducer(GradientExchange):
    """Averages the gradients of `parameters` over the ranks in the buckets of `wrapper`, by Paddle's hooks."""

    missing = "raise"
    waits_for_all = True

    def __init__(self, wrapper: paddle.DataParallel, parameters: Sequence[paddle.Tensor], mesh: Mesh):
        self._wrapper, self._parameters, self._mesh = wrapper, parameters, mesh
        self.mean_over = mesh.ranks
        self._bytes = sum(map(nbytes, parameters))
        self._buckets: ReducerBuckets | None = None

    def begin_micro_batch(self, last: bool) -> None:
        self._wrapper.grad_need_sync = last  # `no_sync` sets it, too, within its block

    def backward(self, last: bool, counted: Count = 0) -> AbstractContextManager[Any]:
        return self._mesh.waiting("the exchange of gradients", computes=True) if last else NOTHING

    def finish(self) -> list[int]:
        traffic.all_reduced(self._bytes, self.mean_over)
        return [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]

    def trace(self) -> None:
        self._buckets = self._buckets or ReducerBuckets(self._wrapper)
        self._buckets.begin()

    def explain(self, error: RuntimeError) -> Exception | None:
        return DivergenceError(_UNUSED) if "find_unused_parameters" in str(error) else None
