"""Which random numbers a layer draws: those that all seats of the tensor axis share, or this rank's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddle import nn
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker


def in_own_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose random numbers come from the rank's own stream (mesh.seed): for what it holds a part of."""

    @functools.wraps(function)
    def forward(*inputs: Any, **named: Any) -> Any:
        with get_rng_state_tracker().rng_state():
            return function(*inputs, **named)

    return forward


def draw_own(layer: nn.Layer, *methods: str) -> None:
    """Lets `methods` of a layer draw from the rank's own stream."""
    for method in methods:
        setattr(layer, method, in_own_stream(getattr(layer, method)))
