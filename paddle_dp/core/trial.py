"""Trials of a model before a training, in a separate process, and additional forwards that leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core.batch_norm import statistics

Result = dict[str, Any]
"""JSON values; under "arrays", a list of NumPy arrays."""
TrialRunner = Callable[[Callable[[], Result]], Result]
"""Runs a function in a separate process, which starts with this one's state, and returns its result
(`train.trial.TrialRunner`)."""


def here(function: Callable[[], Result]) -> Result:
    """Runs the function in this process: a `TrialRunner` for functions with lasting effects."""
    return function()


def random_state() -> list[Any]:
    """Compares equal as long as nothing was drawn from Paddle's generators, and none was set."""
    return [state.__getstate__() for state in paddle.get_rng_state()]


@contextmanager
def trial(model: nn.Layer, *more: nn.Layer) -> Iterator[None]:
    """Wraps forwards without gradients: restores modes, buffers, running statistics and Paddle's generators.

    `more`: layers with further modes to restore. It copies no parameters and no attributes, so it is cheap for large
    models.
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


def buffers_before(model: nn.Layer, loss: Any = None) -> Callable[[], None]:
    """A function that restores the current buffers and running statistics of a model, and of a loss that is a layer;
    also buffers with a tensor that a forward replaces."""
    layers = [
        layer
        for root in (model, loss)
        if isinstance(root, nn.Layer)
        for layer in root.sublayers(include_self=True)
    ]
    tables = [(layer._buffers, dict(layer._buffers)) for layer in layers if layer._buffers]
    tensors = [tensor for _, table in tables for tensor in table.values()]
    tensors += [
        tensor for root in (model, loss) if isinstance(root, nn.Layer) for tensor in statistics(root).values()
    ]
    with paddle.no_grad():
        values = [
            (tensor, tensor.clone()) for tensor in tensors if tensor is not None and tensor._is_initialized()
        ]

    def restore() -> None:
        for table, before in tables:
            table.clear()
            table.update(before)
        with paddle.no_grad():
            for tensor, value in values:
                tensor.set_value(value)

    return restore
