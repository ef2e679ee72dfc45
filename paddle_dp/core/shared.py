"""A function of a tensor that is computed once for all layers that read it, such as an exchange or a rounding."""

from __future__ import annotations

import paddle

from paddle_dp.adjoint import Function

_CACHE_ATTRIBUTE = "shared_by_its_readers"  # an attribute of the tensor, so the cache lives as long as it


def shared(x: paddle.Tensor, function: Function, key: object) -> paddle.Tensor:
    """`function(x)`, computed once for a tensor as long as it does not change. `key`: identifies the function, and the
    group of an exchange.

    A leaf is computed by each reader: it outlives its backward, unlike the cached graph, and `set_value`, which writes
    buffers and parameters, does not count as a change (3.3.1).
    """
    if not paddle.in_dynamic_mode() or x.is_leaf:
        return function(x)
    state = key, x.inplace_version, paddle.is_grad_enabled()
    cached = getattr(x, _CACHE_ATTRIBUTE, None)
    if cached is None or cached[0] != state:
        cached = state, function(x)
        setattr(x, _CACHE_ATTRIBUTE, cached)
    output: paddle.Tensor = cached[1]
    return output
