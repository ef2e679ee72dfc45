"""Around a trial of a model or a loss: nothing of it is left in them, or in any generator of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn


@contextmanager
def untouched(*owners: Any) -> Iterator[None]:
    """Inside, without gradients, layers and other objects may change what they hold and draw what they like.

    Put back are attributes (modes, too), buffers, frozen parameters (the vectors of spectral norm, a teacher's
    weights), and the generators of Paddle, NumPy and Python. What lies inside a list or a dict is not.
    """
    found = [
        one for owner in owners if isinstance(owner, nn.Layer) for one in owner.sublayers(include_self=True)
    ]
    layers = list({id(layer): layer for layer in found}.values())
    others = [owner for owner in owners if not isinstance(owner, nn.Layer)]
    held_by = (getattr(one, "__dict__", None) for one in (*layers, *others))
    tables = [table for table in held_by if isinstance(table, dict)]
    tables += [table for layer in layers for table in (layer._buffers, layer._parameters)]
    before = [(table, dict(table)) for table in tables]
    frozen = [p for layer in layers for p in layer.parameters(include_sublayers=False) if p.stop_gradient]
    buffers = [buffer for layer in layers for buffer in layer.buffers(include_sublayers=False)]
    with paddle.no_grad():
        values = _copies([*buffers, *frozen])
        drawn = paddle.get_rng_state(), np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            for table, held in before:
                table.clear()
                table.update(held)
            for tensor, value in values:
                tensor.set_value(value)
            paddle.set_rng_state(drawn[0])
            np.random.set_state(drawn[1])
            random.setstate(drawn[2])


def _copies(tensors: Iterable[paddle.Tensor]) -> list[tuple[paddle.Tensor, paddle.Tensor]]:
    """Each with its values of now; but `_dropout_state` of Paddle's LSTM and GRU, which has no memory on a CPU."""
    return [(tensor, tensor.clone()) for tensor in tensors if tensor._is_initialized()]
