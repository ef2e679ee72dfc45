"""A function of a tensor that is computed once for all layers that read it, such as an exchange or a rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import paddle

from paddle_dp.adjoint import Function

_CACHE_ATTRIBUTE = "shared_by_its_readers"  # an attribute of the tensor, so the cache lives as long as it
_forward: ContextVar[object | None] = ContextVar("forward", default=None)  # the one that runs


@contextmanager
def single_forward() -> Iterator[None]:
    """Wraps a model's forward. Without gradients nothing in it may write a tensor between two layers that read it."""
    token = _forward.set(_forward.get() or object())
    try:
        yield
    finally:
        _forward.reset(token)


def shared(x: paddle.Tensor, function: Function, key: object) -> paddle.Tensor:
    """`function(x)`, computed once for a tensor as long as it does not change. `key`: identifies the function, and the
    group of an exchange.

    Each reader computes it for a leaf, an input, a buffer or a parameter: it outlives its backward, unlike the cached
    graph, and `set_value` and `copy_` do not count as a change (3.3.1). Without gradients activations are leaves, too:
    their readers share within `single_forward`.
    """
    forward = None if paddle.is_grad_enabled() else _forward.get()
    if not paddle.in_dynamic_mode() or (x.is_leaf and forward is None):
        return function(x)
    state = key, x.inplace_version, paddle.is_grad_enabled(), forward
    cached = getattr(x, _CACHE_ATTRIBUTE, None)
    if cached is None or cached[0] != state:
        cached = state, function(x)
        setattr(x, _CACHE_ATTRIBUTE, cached)
    output: paddle.Tensor = cached[1]
    return output
