"""Batch normalization over the whole global batch, exact for unequal shares, on every device.

Why not `paddle.nn.SyncBatchNorm` (3.3.1): its kernel is not registered on CPU («The kernel `sync_batch_norm` is not
registered»), and on GPU it averages the ranks' statistics with equal weights, which is wrong as soon as one rank holds
fewer samples than another (docs/decisions/0004-own-sync-batch-norm.md).
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.mesh import Mesh

_LOCAL = (nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D)


class _Normalize(PyLayer):
    """y = (x - mean) / sqrt(var + epsilon) with the mean and variance of the samples of all ranks.

    Statistics of the ranks are combined as (count, mean, sum of squared deviations), one exchange, by the parallel
    algorithm of Chan, Golub & LeVeque (1979), which does not cancel as E[x²] - E[x]² does.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, layer: SyncBatchNorm
    ) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        axes, present = layer.axes(x), float(layer.present)
        wide = x.astype("float32")
        count = paddle.full([1], present * x.size / x.shape[layer.channel_dim(x)])
        mean = wide.mean(axes)
        deviation = ((wide - layer.spread(mean, x)) ** 2).sum(axes)
        told = paddle.stack(layer.mesh.gather_tensor(paddle.concat([count, mean, deviation * present])))
        counts = told[:, :1]
        means, deviations = paddle.split(told[:, 1:], 2, axis=1)
        total = counts.sum().clip(min=1.0)
        mean = (counts * means).sum(0) / total
        variance = (deviations.sum(0) + (counts * (means - mean) ** 2).sum(0)) / total
        scale = paddle.rsqrt(variance + layer.epsilon)
        normal = (wide - layer.spread(mean, x)) * layer.spread(scale, x)
        ctx.layer, ctx.total, ctx.present = layer, total, present
        ctx.save_for_backward(normal, scale)
        return normal.astype(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor, *_: Any) -> paddle.Tensor:
        normal, scale = ctx.saved_tensor()
        layer: SyncBatchNorm = ctx.layer
        axes, wide = layer.axes(normal), grad.astype("float32")
        sums = paddle.stack([wide.sum(axes), (wide * normal).sum(axes)])
        sums = layer.mesh.sum_tensor(sums) / ctx.total
        inner = wide - layer.spread(sums[0], normal) - normal * layer.spread(sums[1], normal)
        # A ghost's output hangs on the statistics, but they do not hang on it.
        return (inner * layer.spread(scale * ctx.present, normal)).astype(grad.dtype)


class SyncBatchNorm(nn.Layer):
    """Takes a finished BatchNorm's parameters and buffers, and normalizes over all ranks' samples.

    In evaluation it is the local layer. One single value per channel in the whole batch normalizes to 0 here; Paddle's
    local kernel hands it through unchanged. `present` is set to False while this rank computes on a ghost sample, which
    must not count.
    """

    def __init__(self, local: nn.Layer, mesh: Mesh):
        super().__init__()
        self.mesh, self.present = mesh, True
        self.epsilon, self.momentum = local._epsilon, local._momentum
        self.channels_last = local._data_format.endswith("C") and local._data_format != "NC"
        self.weight, self.bias = local.weight, local.bias
        self._mean, self._variance = local._mean, local._variance  # parameters without gradient, in Paddle
        self._local = [local]  # in a list: not a sublayer, so that the names of the state stay the same

    def channel_dim(self, x: paddle.Tensor) -> int:
        return x.ndim - 1 if self.channels_last else 1

    def axes(self, x: paddle.Tensor) -> list[int]:
        return [axis for axis in range(x.ndim) if axis != self.channel_dim(x)]

    def spread(self, values: paddle.Tensor, x: paddle.Tensor) -> paddle.Tensor:
        """`values` [channels], shaped so that it broadcasts against `x`."""
        shape = [1] * x.ndim
        shape[self.channel_dim(x)] = values.shape[0]
        return values.reshape(shape)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training:
            local = self._local[0]
            local.training = False
            return local(x)
        normal, mean, variance = _Normalize.apply(x, self)
        with paddle.no_grad():
            for buffer, value in ((self._mean, mean), (self._variance, variance)):
                buffer.set_value(self.momentum * buffer + (1 - self.momentum) * value)
        if self.weight is not None:
            normal = normal * self.spread(self.weight, x).astype(normal.dtype)
        if self.bias is not None:
            normal = normal + self.spread(self.bias, x).astype(normal.dtype)
        return normal


def synchronize(model: nn.Layer, mesh: Mesh) -> nn.Layer:
    """Replaces every BatchNorm inside `model` by one over the whole mesh, with the same parameters and names."""
    if isinstance(model, _LOCAL):
        return SyncBatchNorm(model, mesh)
    for parent in model.sublayers(include_self=True):
        if isinstance(parent, SyncBatchNorm):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, _LOCAL):
                parent.add_sublayer(name, SyncBatchNorm(child, mesh))
    return model


def statistics(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """The running statistics inside `model` by name: what is averaged, not learned.

    Floating-point buffers, and the mean and variance of BatchNorm layers, which Paddle keeps as parameters.
    """
    found = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer, (*_LOCAL, nn.BatchNorm, SyncBatchNorm)):
            prefix = f"{name}." if name else ""
            found |= {f"{prefix}{word}": getattr(layer, word) for word in ("_mean", "_variance")}
    return found


def local_norms(model: nn.Layer) -> list[str]:
    """The names of the layers that normalize over one rank's samples only."""
    return [name for name, layer in model.named_sublayers(include_self=True) if isinstance(layer, _LOCAL)]
