"""Shards the channels of convolutions and norms over the tensor axis, in place: layer, hooks and names stay.

As in Megatron-LM's MLP (Shoeybi et al., arXiv:1909.08053, section 3), the first convolution computes some channels on
each rank, norms and activations process them, and the second convolution's products are summed over the ranks. A weight
[outputs, inputs / groups, …] is sliced along its outputs or its inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import paddle
from paddle import nn
from paddle.distributed.fleet.layers.mpu import mp_ops

from paddle_dp.axes.tensor.shared_input import copied
from paddle_dp.core.batch_norm import is_batch_norm
from paddle_dp.core.data_group import Group
from paddle_dp.core.wrapping import Method, wrap
from paddle_dp.model.convolution_on_cpu import quick_convolutions

CONVOLUTIONS = (nn.Conv1D, nn.Conv2D, nn.Conv3D)
OUTPUTS, INPUTS = 0, 1  # dims of a convolution's weight
copying: WeakSet[nn.Layer] = WeakSet()  # convolutions that all-reduce their inputs' gradients


def has_channels(layer: Any) -> bool:
    """Whether a layer has weights and can be sharded as `channels`: a convolution, or a norm per channel."""
    return isinstance(layer, CONVOLUTIONS) or is_batch_norm(layer)


def is_grouped(layer: Any) -> bool:
    """Whether a layer is a convolution with several groups."""
    return isinstance(layer, CONVOLUTIONS) and layer._groups > 1


def channels_of(layer: Any) -> int:
    """The number of channels, or groups of channels, that the ranks must divide to shard a layer as `channels`."""
    if isinstance(layer, CONVOLUTIONS):
        return int(layer._groups if is_grouped(layer) else layer.weight.shape[OUTPUTS])
    return int(layer._mean.shape[0])


def takes_all(layer: nn.Layer, group: Group) -> None:
    """Prepares a convolution with sharded outputs: the input is the same on all ranks, and its gradients are
    all-reduced. A grouped convolution takes only its groups' inputs, which are sharded alike."""
    if is_grouped(layer):
        layer._groups //= group.nranks
        return

    def for_all(function: Method) -> Method:
        return lambda x: function(copied(x, group))

    copying.add(layer)
    _exchange(layer, for_all)


def sums(layer: nn.Layer, group: Group) -> None:
    """Prepares a convolution with sharded inputs: the ranks' products are summed, and the bias is added once."""

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
        quick_convolutions(layer)  # first: it skips layers with a wrapped forward
    wrap(layer, "forward", "tensor", around)


def channel_dim(layer: Any) -> int:
    """The channel dim of a convolution's inputs and outputs."""
    return int(layer._channel_dim)


def with_bias(layer: nn.Layer, outputs: paddle.Tensor, bias: paddle.Tensor | None) -> paddle.Tensor:
    """A convolution's outputs plus a bias per channel."""
    if bias is None:
        return outputs
    shape = [1] * outputs.ndim
    shape[channel_dim(layer)] = -1
    return outputs + bias.reshape(shape)


@contextmanager
def instead(layer: nn.Layer, **values: paddle.Tensor | None) -> Iterator[None]:
    """Within the block, a layer computes with these values in place of its parameters, or of emulated low precision's
    values."""
    attributes = layer.__dict__
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)
