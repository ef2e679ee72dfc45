"""Extra forwards of a model, which leave no trace: what they change is restored; and how their outputs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.framework.random import Generator  # ppdiffusers replaces paddle.Generator

from paddle_dp.core.batch_norm import statistics
from paddle_dp.identity.walk import layer_attributes
from paddle_dp.tensors import dtype_of


def random_state() -> list[Any]:
    """Compares equal as long as nothing was drawn from Paddle's generators that this process uses, the CPU's and its
    device's, and neither was set. `paddle.get_rng_state` reads every generator of the machine."""
    return [Generator(name).get_state().__getstate__() for name in {"cpu", paddle.get_device()}]


def how_different(expected: Any, actual: Any, tolerance: float) -> str:
    """How two outputs of one shape differ, as a part of a sentence; "" if they do not.

    Finite numbers may differ by `tolerance`, relative to the largest of `expected`; others must be the same.
    """
    wide = [x.astype("float32") if dtype_of(x) == "bfloat16" else x for x in (expected, actual)]
    a, b = map(np.asarray, wide)
    if a.dtype.kind not in "fc":
        return "differ" if (a != b).any() else ""
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(b[finite]).all():
        return "differ in what is infinite or NaN"
    difference, largest = (float(np.abs(x).max(initial=0.0)) for x in (a[finite] - b[finite], a[finite]))
    if difference <= tolerance * largest:
        return ""
    return f"differ by up to {difference:.2g}, and the largest is {largest:.2g}"


@contextmanager
def extra_forwards(model: nn.Layer, *more: Any) -> Iterator[None]:
    """Wraps extra forwards, without gradients: restores modes, buffers, running statistics and Paddle's generators.

    `more`: further layers to restore, such as a loss; other objects are skipped. It copies no parameters, and of
    attributes those alone that `buffers_before` names, so it is cheap for large models.
    """
    modes = [(layer, layer.training) for layer in _sublayers(model, *more)]
    state, undo = paddle.get_rng_state(), buffers_before(model, *more)
    with paddle.no_grad():
        try:
            yield
        finally:
            paddle.set_rng_state(state)
            undo()
            for layer, training in modes:
                layer.training = training


def buffers_before(*roots: Any) -> Callable[[], None]:
    """A function that restores the current buffers and running statistics of `roots`, a model and a loss, if they are
    layers; also buffers with a tensor that a forward replaces or registers. A layer with buffers gets back its other
    attributes, too: `self.ready` says whether forward has filled the buffer. One that makes its weights in a
    forward keeps them, and its attributes."""
    layers = _sublayers(*roots)
    tables = [(layer._buffers, dict(layer._buffers)) for layer in layers]
    layer_states = [(layer, _attributes(layer), _weights(layer)) for layer in layers]
    tensors = [tensor for _, table in tables for tensor in table.values() if tensor is not None]
    tensors += [x for root in roots if isinstance(root, nn.Layer) for x in statistics(root).values()]
    distinct = {id(tensor): tensor for tensor in tensors if tensor._is_initialized()}.values()
    with paddle.no_grad():
        values = [(tensor, tensor.clone()) for tensor in distinct]

    def restore() -> None:
        for layer, attributes, weights in layer_states:
            if layer._buffers and _weights(layer) == weights:  # some buffers may be new
                for name in _attributes(layer).keys() - attributes.keys():
                    del vars(layer)[name]
                vars(layer).update(attributes)
        for table, before in tables:
            table.clear()
            table.update(before)
        with paddle.no_grad():
            for tensor, value in values:
                tensor.set_value(value)

    return restore


def _attributes(layer: nn.Layer) -> dict[str, Any]:
    """A layer's attributes, without every nn.Layer's tables, hooks and mode. The contents of lists and dicts stay."""
    return {name: value for name, value in vars(layer).items() if name not in layer_attributes()}


def _weights(layer: nn.Layer) -> list[str]:
    """The names of a layer's own parameters and sublayers."""
    return [*layer._parameters, *layer._sub_layers]


def _sublayers(*roots: Any) -> list[nn.Layer]:
    """The layers of `roots`, themselves included, each once."""
    layers = [root for root in roots if isinstance(root, nn.Layer)]
    sublayers = [sublayer for layer in layers for sublayer in layer.sublayers(include_self=True)]
    return list({id(layer): layer for layer in sublayers}.values())
