"""Which random numbers are drawn for what a seat of the tensor axis holds a part of.

Dropout of a learner (`parallel.dropout`) drops the part that one process would drop there. All else that is drawn, and
dropout under `train.dropout: own`, comes from the rank's own stream there (mesh.seed, fleet's tracker), and from the
stream that all seats share where they hold the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from paddle import nn
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.parallel.dropout import current, within_part
from paddle_dp.parallel.dropout.scope import Kind


def draw_part(layer: nn.Layer, kind: Kind, group: Any, *methods: str) -> None:
    """Lets `methods` of a layer draw what is this seat's: it holds its part of the `kind`, over the tensor axis."""
    for method in methods:
        own = _in_own_stream(getattr(layer, method))
        setattr(layer, method, within_part(own, "tensor", kind, group.rank, group.nranks))


def _in_own_stream(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(*inputs: Any, **named: Any) -> Any:
        if current() is not None:
            return function(*inputs, **named)
        with get_rng_state_tracker().rng_state():
            return function(*inputs, **named)

    return forward
