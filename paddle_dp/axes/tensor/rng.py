"""Random numbers for activations of which a rank of the tensor axis holds a slice.

Exact dropout (`core.dropout`) draws this rank's slice of one process's mask. Other draws, and dropout under
`train.dropout: own`, use the rank's separate stream (`mesh.mesh.seed_ranks`, fleet's tracker); activations that all
ranks hold in full use the common stream.
"""

from __future__ import annotations

from typing import Any

from paddle import nn
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.core.data_group import Group
from paddle_dp.core.dropout import current, within_slice
from paddle_dp.core.dropout.scope import Kind
from paddle_dp.core.dropout.uncaught import another_stream
from paddle_dp.core.wrapping import Method, wrap


def draw_slice(layer: nn.Layer, kind: Kind, group: Group, *methods: str) -> None:
    """Makes `methods` of a layer draw for this rank's slice of the activations; `kind` names the sliced dim."""

    def for_slice(function: Method) -> Method:
        return within_slice(_in_rank_stream(function), "tensor", kind, group.rank, group.nranks)

    for method in methods:
        wrap(layer, method, "random numbers", for_slice)


def _in_rank_stream(function: Method) -> Method:
    def forward(*inputs: Any, **named: Any) -> Any:
        if current() is not None:
            return function(*inputs, **named)
        with another_stream(get_rng_state_tracker().rng_state()):
            return function(*inputs, **named)

    return forward
