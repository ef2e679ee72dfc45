"""Emulates low precision on CPUs: rounds a layer's inputs, weights and outputs, and computes in float32 in between.

`paddle.amp.auto_cast` does nothing on a CPU (3.3.1 warns «it makes no effect» and stays in float32). Here inputs,
weights and outputs of matrix products and convolutions, and their gradients, are rounded to bfloat16 or float16, as
autocast's O1 list does on a GPU; inner sums stay float32, as in tensor cores. Layers with the same input share its
rounded copy, so that cut ones exchange it once (`core.shared`): its gradient is rounded after their sum. This shows
the effect of the precision on a model; it saves neither time nor memory, and what ranks exchange is float32.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu import ColumnParallelLinear, RowParallelLinear
from paddle.distributed.fleet.utils.sequence_parallel_utils import (
    ColumnSequenceParallelLinear,
    RowSequenceParallelLinear,
)

from paddle_dp.adjoint import WithAdjoint
from paddle_dp.core.shared import shared

_CUT = (ColumnParallelLinear, RowParallelLinear, ColumnSequenceParallelLinear, RowSequenceParallelLinear)
ROUNDED = (
    *_CUT,
    nn.Linear,
    nn.Conv1D,
    nn.Conv2D,
    nn.Conv3D,
    nn.Conv1DTranspose,
    nn.Conv2DTranspose,
    nn.Conv3DTranspose,
)


class Rounder:
    """Hooks a model's linear and convolution layers, which round to `dtype` while `active`."""

    def __init__(self, model: nn.Layer, dtype: str):
        self.dtype, self.active = dtype, False
        self.watch(model)

    def watch(self, model: nn.Layer) -> None:
        """Hooks the layers of this model, too."""
        for layer in model.sublayers(include_self=True):
            if isinstance(layer, ROUNDED):
                layer.register_forward_pre_hook(self._before)
                layer.register_forward_post_hook(self._after)

    def _round(self, x: Any) -> Any:
        return WithAdjoint.apply(x, self._to_dtype, self._to_dtype) if _is_float32(x) else x

    def _round_input(self, x: Any) -> Any:
        return shared(x, self._round, ("rounded", self.dtype)) if _is_float32(x) else x

    def _to_dtype(self, x: paddle.Tensor) -> paddle.Tensor:
        """Rounds a tensor, or its gradient, to `dtype` and back."""
        return x.astype(self.dtype).astype("float32")

    def _before(self, layer: nn.Layer, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.active:
            return None
        for name, parameter in layer.named_parameters(include_sublayers=False):
            layer.__dict__[name] = self._round(parameter)  # hides the parameter during this call
        return tuple(map(self._round_input, inputs))

    def _after(self, layer: nn.Layer, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self.active:
            return None
        for name, _ in layer.named_parameters(include_sublayers=False):
            layer.__dict__.pop(name, None)
        return self._round(output)


def _is_float32(x: Any) -> bool:
    return isinstance(x, paddle.Tensor) and x.dtype == paddle.float32
