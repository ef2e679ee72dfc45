"""The one way in which a method of a model's layer is wrapped, and the order of several wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from paddle import nn

# From the inside out. What recompute computes again draws its random numbers again, and does not exchange tokens for
# heads again. (Hooks lie outside of all of them: Paddle runs them around `forward`.)
ORDER = ("random numbers", "recompute", "sequence")
_wrapped: WeakKeyDictionary[nn.Layer, dict[str, str]] = WeakKeyDictionary()  # the outermost of each method

Method = Callable[..., Any]


def wrap(layer: nn.Layer, method: str, kind: str, wrapper: Callable[[Method], Method]) -> None:
    """Puts `wrapper(method)` in a method's place, on this layer alone. `kind` is one of ORDER.

    Raises ValueError where the method is wrapped by a kind already that belongs outside of this one.
    """
    around = _wrapped.setdefault(layer, {})
    outermost = around.get(method, kind)
    if ORDER.index(kind) < ORDER.index(outermost):
        raise ValueError(
            f"{type(layer).__name__}.{method} is wrapped for {outermost} already, and {kind} belongs inside of it"
        )
    own = getattr(layer, method)
    wrapped = wrapper(own)
    setattr(layer, method, wrapped if wrapped is own else functools.update_wrapper(wrapped, own))
    around[method] = kind
