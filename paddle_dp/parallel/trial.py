"""Trial forwards, which must leave a model and Paddle's generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.parallel.batch_norm import statistics


def random_state() -> list[Any]:
    """Compares equal as long as nothing was drawn from Paddle's generators, and none was set."""
    return [state.__getstate__() for state in paddle.get_rng_state()]


@contextmanager
def trial(model: nn.Layer, *more: nn.Layer) -> Iterator[None]:
    """Around forwards without gradients: restores modes, buffers, running statistics and Paddle's generators.

    `more` are layers whose modes are restored, too. Unlike `untouched`, it copies no parameters and no attributes, so
    that it is cheap for large models.
    """
    layers = [layer for root in (model, *more) for layer in root.sublayers(include_self=True)]
    modes = [(layer, layer.training) for layer in layers]
    tensors = [*statistics(model).values(), *model.buffers()]
    with paddle.no_grad():
        values = [(tensor, tensor.clone()) for tensor in tensors if tensor._is_initialized()]
        state = paddle.get_rng_state()
        try:
            yield
        finally:
            paddle.set_rng_state(state)
            for tensor, value in values:
                tensor.set_value(value)
            for layer, training in modes:
                layer.training = training
