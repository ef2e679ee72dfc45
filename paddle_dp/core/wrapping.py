"""Wraps methods of a model's layers, several times if need be, in a fixed order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from paddle import nn

# From the inside out: recompute repeats draws and exchanges over the tensor axis, but not the exchange of tokens for
# heads. (Hooks are outside all wrappers: Paddle runs them around `forward`.)
ORDER = ("random numbers", "tensor", "recompute", "sequence")
_wrapped: WeakKeyDictionary[nn.Layer, dict[str, str]] = WeakKeyDictionary()  # the outermost of each method

Method = Callable[..., Any]


def wrap(layer: nn.Layer, method: str, kind: str, wrapper: Callable[[Method], Method]) -> None:
    """Replaces a method of this layer object with `wrapper(method)`. `kind` is one of ORDER.

    Raises ValueError if the method already has a wrapper of a kind later in ORDER.
    """
    around = _wrapped.setdefault(layer, {})
    outermost = around.get(method, kind)
    if ORDER.index(kind) < ORDER.index(outermost):
        raise ValueError(
            f"{type(layer).__name__}.{method} is wrapped for {outermost} already, and {kind} belongs inside of it"
        )
    current = getattr(layer, method)
    wrapped = wrapper(current)
    setattr(layer, method, wrapped if wrapped is current else functools.update_wrapper(wrapped, current))
    around[method] = kind
