"""On CPUs, computes a linear layer's bias as a product with ones, so that its gradient is a product, too.

Paddle 3.3.1 sums a bias's gradient in a loop that takes longer than the layer's products. Without it a step takes 0.70
of the time for a GPT of width 256, 0.72 for an MLP of width 1024 (2-core EPYC, one thread). Plain operations, unlike a
PyLayer, support gradients of gradients.

A small layer calls Paddle's kernel directly, which skips F.linear's lookup of a flag by name: 4 of 21 µs.
"""

from __future__ import annotations

from math import prod
from types import MethodType
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import nn

# Output elements from which on the loop costs more than two more operations (20 µs).
ELEMENTS = 1 << 14
# Of a small layer; in Paddle for GPUs a flag chooses among other kernels.
_small = F.linear if paddle.is_compiled_with_cuda() else paddle._C_ops.linear


def linear(
    x: paddle.Tensor, weight: paddle.Tensor, bias: Any = None, name: str | None = None
) -> paddle.Tensor:
    """F.linear: x [..., inputs] · weight [inputs, outputs] + bias [outputs], equal to the bit; the bias's gradient is
    the same sum in another order."""
    if not isinstance(x, paddle.Tensor):  # in a program shapes are not numbers
        return F.linear(x, weight, bias, name)
    rows = prod(x.shape[:-1])  # x.size would take 10 µs: Paddle computes it with NumPy
    if rows * weight.shape[1] < ELEMENTS:
        return _small(x, weight, bias)
    learns = bias is not None and not bias.stop_gradient and paddle.is_grad_enabled()
    if not learns or x.dtype not in (paddle.float32, paddle.float64):
        return F.linear(x, weight, bias, name)
    out = F.linear(x, weight)
    return out + paddle.matmul(paddle.ones([rows, 1], out.dtype), bias.unsqueeze(0)).reshape(out.shape)


def quick_biases(model: nn.Layer) -> None:
    """Makes the model's linear layers use `linear`, in place: plain ones, and fleet's sharded ones, which hold their
    linear function in an attribute. A subclass, layer or class with a replaced `forward` keeps it."""
    default = nn.Linear.forward
    plain = (default.__module__, default.__qualname__) == (nn.Linear.__module__, "Linear.forward")
    for layer in model.sublayers(include_self=True):
        if plain and type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = MethodType(forward, layer)
        elif vars(layer).get("linear") is F.linear:
            layer.linear = linear


def forward(self: nn.Linear, inputs: paddle.Tensor) -> paddle.Tensor:
    """A linear layer's forward. As a named function it is pickled with its layer, which then is Paddle's again; the
    name "self" marks it as a method for paddle.jit."""
    return linear(inputs, self.weight, self.bias, self.name)
