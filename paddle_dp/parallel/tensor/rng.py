"""Which random numbers are drawn for what a rank of the tensor axis holds a slice of.

Dropout of a learner (`parallel.dropout`) drops what one process would drop there. All else that is drawn, and
dropout under `train.dropout: own`, comes from the rank's own stream there (mesh.seed, fleet's tracker), and from the
stream that all ranks share where they hold the same.
"""

from __future__ import annotations

from typing import Any

from paddle import nn
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.parallel.dropout import current, within_slice
from paddle_dp.parallel.dropout.scope import Kind
from paddle_dp.parallel.dropout.unseen import another_stream
from paddle_dp.parallel.hcg import Group
from paddle_dp.parallel.wrapping import Method, wrap


def draw_slice(layer: nn.Layer, kind: Kind, group: Group, *methods: str) -> None:
    """Lets `methods` of a layer draw what is this rank's: there it holds a slice of this `kind` over tensor."""

    def drawing(function: Method) -> Method:
        return within_slice(_in_own_stream(function), "tensor", kind, group.rank, group.nranks)

    for method in methods:
        wrap(layer, method, "random numbers", drawing)


def _in_own_stream(function: Method) -> Method:
    def forward(*inputs: Any, **named: Any) -> Any:
        if current() is not None:
            return function(*inputs, **named)
        with another_stream(get_rng_state_tracker().rng_state()):
            return function(*inputs, **named)

    return forward
