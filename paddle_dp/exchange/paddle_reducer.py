"""The exchange of gradients by paddle.DataParallel's reducer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import paddle

from paddle_dp.core.loss import Count
from paddle_dp.errors import DivergenceError
from paddle_dp.exchange.gradient_exchange import NOTHING, GradientExchange
from paddle_dp.exchange.reducer_buckets import ReducerBuckets
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.traffic import traffic
from paddle_dp.tensors import nbytes

_UNUSED = (
    "a parameter that was used before is not used in this forward, on this rank at least, and paddle.DataParallel "
    "waits for its gradient. Set strategy.find_unused_parameters=true, or use every parameter in every forward."
)


class PaddleReducer(GradientExchange):
    """Averages the gradients of `parameters` over the ranks in the buckets of `wrapper`, by Paddle's hooks."""

    missing = "refuse"
    waits_for_all = True

    def __init__(self, wrapper: paddle.DataParallel, parameters: Sequence[paddle.Tensor], mesh: Mesh):
        self._wrapper, self._parameters, self._mesh = wrapper, parameters, mesh
        self.mean_over = mesh.ranks
        self._bytes = sum(map(nbytes, parameters))
        self._buckets: ReducerBuckets | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        around: AbstractContextManager[Any] = NOTHING if last else self._wrapper.no_sync()
        return around

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
