"""Convolutions and norms whose channels are cut over the tensor axis, in place: layer, hooks and names stay.

As Megatron-LM cuts the two linears of an MLP (Shoeybi et al., arXiv:1909.08053, section 3): the first convolution makes
some of the channels on each rank, norms and activations between work on these, the second one takes them in, and the
ranks' products are summed. A weight [outputs, inputs / groups, …] is a slice of its outputs, or of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.parallel.batch_norm import is_batch_norm
from paddle_dp.parallel.convolution_on_cpu import quick_convolutions
from paddle_dp.parallel.hcg import Group
from paddle_dp.parallel.tensor.shared_input import copied
from paddle_dp.parallel.wrapping import Method, wrap

CONVOLUTIONS = (nn.Conv1D, nn.Conv2D, nn.Conv3D)
OUTPUTS, INPUTS = 0, 1  # dims of a convolution's weight
copying: WeakSet[nn.Layer] = WeakSet()  # convolutions whose inputs' gradients are exchanged


def has_channels(layer: Any) -> bool:
    """Whether a layer can be cut as `channels` and has weights: a convolution, or a norm of each channel."""
    return isinstance(layer, CONVOLUTIONS) or is_batch_norm(layer)


def is_grouped(layer: Any) -> bool:
    """Whether each of several groups of a convolution's outputs is made of some of its inputs only."""
    return isinstance(layer, CONVOLUTIONS) and layer._groups > 1


def channels_of(layer: Any) -> int:
    """How many channels, or groups of them, the ranks must divide where a layer is cut as `channels`."""
    if isinstance(layer, CONVOLUTIONS):
        return int(layer._groups if is_grouped(layer) else layer.weight.shape[OUTPUTS])
    return int(layer._mean.shape[0])


def takes_all(layer: nn.Layer, group: Group) -> None:
    """A convolution whose outputs are cut. It has the same input on all ranks, whose gradients are summed; one of
    several groups of channels has its own groups' inputs, as they are cut."""
    if is_grouped(layer):
        layer._groups //= group.nranks
        return

    def for_all(function: Method) -> Method:
        return lambda x: function(copied(x, group))

    copying.add(layer)
    _exchange(layer, for_all)


def sums(layer: nn.Layer, group: Group) -> None:
    """A convolution whose inputs are cut: the ranks' products are summed, and the bias is added once."""

    def summing(function: Method) -> Method:
        def forward(x: paddle.Tensor) -> paddle.Tensor:
            bias = layer.bias
            with instead(layer, bias=None):
                total = mp_ops._mp_allreduce(function(x), group=group)
            return with_bias(layer, total, bias)

        return forward

    _exchange(layer, summing)


def _exchange(layer: nn.Layer, around: Any) -> None:
    if paddle.get_device() == "cpu":
        quick_convolutions(layer)  # which leaves a layer alone whose forward is wrapped
    wrap(layer, "forward", "tensor", around)


def channel_dim(layer: Any) -> int:
    """The dim of a convolution's inputs and outputs that is their channels."""
    return int(layer._channel_dim)


def with_bias(layer: nn.Layer, outputs: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """A convolution's outputs plus a bias for each channel."""
    if bias is None:
        return outputs
    shape = [1] * outputs.ndim
    shape[channel_dim(layer)] = -1
    return outputs + bias.reshape(shape)


@contextmanager
def instead(layer: nn.Layer, **values: paddle.Tensor | None) -> Iterator[None]:
    """Inside, a layer computes with these in place of its parameters, or of what emulated low precision has put before
    them."""
    attributes = layer.__dict__
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)
