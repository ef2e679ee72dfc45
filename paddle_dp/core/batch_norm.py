"""Batch normalization over the whole global batch, exact for unequal shares, on every device.

`paddle.nn.SyncBatchNorm` (3.3.1) has no CPU kernel ("The kernel `sync_batch_norm` is not registered"), and on GPU it
averages the ranks' statistics with equal weights, which is wrong if one rank holds fewer samples than another
(docs/decisions/0004-own-sync-batch-norm.md).

A model may also have BatchNorms over one rank's samples; a training may freeze and unfreeze them. `RunningStatistics`
averages the ranks' statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.autograd import PyLayer
from paddle.base.dygraph_utils import _append_activation_in_dygraph

from paddle_dp.core.data_group import ProcessGroup
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh


class LocalNorms:
    """Watches the BatchNorms among `layers`, by whole-model name. `watched`: those that are local, or may become so.
    `in_evaluation`: the names of those that normalize by the samples of a batch there, too."""

    def __init__(self, layers: Sequence[tuple[str, nn.Layer]]):
        self.in_evaluation = [name for name, layer in layers if _has_trainable_statistics(layer)]
        self.watched = [(name, layer) for name, layer in layers if keeps_statistics(layer)]
        self._now: frozenset[str] = frozenset()
        self._ever: frozenset[str] = frozenset()

    def look(self) -> bool:
        """Called before an update: True if a local norm was frozen since the last update. The same on every rank."""
        before, self._now = self._now, self._local()
        self._ever |= self._now
        return not before <= self._now

    def names(self) -> list[str]:
        """The names of norms that are local, or were in an update."""
        local = self._local() | self._ever
        return [name for name, _ in self.watched if name in local]

    def _local(self) -> frozenset[str]:
        return frozenset(name for name, layer in self.watched if is_local(layer))


# paddle.nn.BatchNorm, used by the densenets of paddle.vision, shares no base class with the others.
_PADDLES = (nn.BatchNorm, nn.BatchNorm1D, nn.BatchNorm2D, nn.BatchNorm3D, nn.SyncBatchNorm)
_FORWARDS = {kind.forward for kind in _PADDLES}


class _Normalize(PyLayer):
    """y = (x - mean) / sqrt(var + epsilon) · weight + bias with the mean and variance over the samples of all ranks.

    One exchange combines the ranks' statistics as (count, mean, sum of squared deviations), by the parallel algorithm
    of Chan, Golub & LeVeque (1979), without the cancellation of E[x²] - E[x]². All passes over x, also in backward, use
    Paddle's batch_norm with given statistics: broadcasting over channels takes 40 times as long on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, weight: paddle.Tensor, bias: paddle.Tensor, layer: SyncBatchNorm
    ) -> paddle.Tensor:
        wide = x if x.dtype == paddle.float64 else x.astype("float32")
        present = float(layer.present)
        count = paddle.full([1], present * x.size / weight.size, wide.dtype)
        mean = layer.over_samples(wide) * (weight.size / x.size)
        centred = layer.affine(wide, mean, paddle.full_like(mean, 1 - layer.epsilon))
        deviation = layer.over_samples(centred.square())
        index = paddle.full([1], layer.index, wide.dtype)
        local_statistics = paddle.concat([count, index, mean, deviation * present])
        rank_statistics = paddle.stack(layer.mesh.gather_tensor(local_statistics))
        counts = rank_statistics[:, :1]
        means, deviations = paddle.split(rank_statistics[:, 2:], 2, axis=1)
        samples = counts.sum()
        total = layer.check_same_layer(samples.clip(min=1.0), rank_statistics[:, 1])
        ctx.layer, ctx.present = layer, present
        ctx.needs_gradient = [not tensor.stop_gradient for tensor in (x, weight, bias)]
        # With one value per channel in the whole batch, Paddle's kernel returns x. The device is read only if this
        # rank has a single value.
        ctx.single = wide.size == weight.size and total.item() == 1.0
        if ctx.single:
            return x.clone()
        mean = (counts * means).sum(0) / total
        variance = (deviations.sum(0) + (counts * (means - mean).square()).sum(0)) / total
        layer.keep(mean, variance, samples)
        ctx.total = total
        ctx.save_for_backward(wide, mean, variance, weight)
        return layer.affine(wide, mean, variance, weight, bias).astype(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        if ctx.single:
            # Two tensors: Paddle keeps them as gradients and adds in place, so a single one would get both sums.
            grad_x = grad * ctx.present
            grad_weight, grad_bias = (paddle.zeros_like(ctx.layer._mean) for _ in range(2))
            if grad.place.is_cpu_place() and not ctx.needs_gradient[0]:  # as Paddle's kernel on CPUs (3.3.1)
                grad_bias = ctx.layer.over_samples(grad_x.astype(grad_bias.dtype))
            return tuple(
                gradient if needed else None
                for gradient, needed in zip((grad_x, grad_weight, grad_bias), ctx.needs_gradient, strict=True)
            )
        wide, mean, variance, weight = ctx.saved_tensor()
        layer: SyncBatchNorm = ctx.layer
        with paddle.enable_grad():
            leaves = [wide.detach(), weight.detach(), paddle.zeros_like(weight)]
            for leaf in leaves:
                leaf.stop_gradient = False
            normal = layer.affine(leaves[0], mean, variance, leaves[1], leaves[2])
            grad_x, grad_weight, grad_bias = paddle.grad([normal], leaves, [grad.astype(wide.dtype)])
        sums = layer.mesh.sum_tensor(paddle.stack([grad_weight, grad_bias])) / ctx.total
        scale = paddle.rsqrt(variance + layer.epsilon) * weight
        # mean and variance depend on x, too. A dummy batch reads them but does not contribute to them.
        grad_x = grad_x - layer.affine(wide, mean, variance, sums[0] * scale, sums[1] * scale)
        gradients = (
            (grad_x * ctx.present if not ctx.present else grad_x).astype(grad.dtype),
            grad_weight,
            grad_bias,
        )
        return tuple(
            gradient if needed else None
            for gradient, needed in zip(gradients, ctx.needs_gradient, strict=True)
        )


class SyncBatchNorm(nn.Layer):
    """Normalizes over all ranks' samples. `synchronize` makes it the class of a finished BatchNorm: the same object, so
    that the hooks on it, and every list or attribute that has it, stay.

    In evaluation, or with `use_global_stats`, it is the local layer. `present` is False while this rank computes on a
    dummy sample, which must not count. `index` identifies the BatchNorm within the model, to detect ranks that run
    different ones.
    """

    def __deepcopy__(self, copies: dict[int, Any]) -> SyncBatchNorm:
        """A copy normalizes over the same ranks, whose process groups have no copies."""
        copies[id(self.mesh)] = self.mesh
        layer = copies[id(self)] = type(self).__new__(type(self))
        layer.__dict__.update(copy.deepcopy(self.__dict__, copies))
        return layer

    def check_same_layer(self, total: paddle.Tensor, indices: paddle.Tensor) -> paddle.Tensor:
        """Returns `total` if the statistics of all ranks are this layer's.

        Ranks on different paths through the model would mix statistics of different layers. On CPUs this raises
        UsageError; elsewhere, so that the host does not wait for the device, the total is NaN, which ends the training.
        """
        differ = (indices != self.index).any()
        if not total.place.is_cpu_place():
            return paddle.where(differ, paddle.full_like(total, float("nan")), total)
        if differ.item():
            raise UsageError(
                "BatchNorm over all ranks: ranks are in different BatchNorm layers at the same time, so the model's "
                "forward runs other layers on one rank than on another (experts, layers left out at random). Let each "
                "rank run all BatchNorms, or set strategy.sync_batch_norm=false, which is not one process's training "
                "(docs/same.md)."
            )
        return total

    def over_samples(self, x: paddle.Tensor) -> paddle.Tensor:
        """The sum per channel, [channels]; x is contiguous, so this is faster than a sum over several axes."""
        if self.channels_last:
            return x.reshape([-1, x.shape[-1]]).sum(0)
        return x.reshape([x.shape[0], x.shape[1], -1]).sum(-1).sum(0)

    def affine(
        self,
        x: paddle.Tensor,
        mean: paddle.Tensor,
        variance: paddle.Tensor,
        weight: paddle.Tensor | None = None,
        bias: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        """(x - mean) / sqrt(variance + epsilon) · weight + bias, per channel."""
        layout = "NHWC" if self.channels_last else "NCHW"
        return paddle.nn.functional.batch_norm(
            x, mean, variance, weight, bias, training=False, epsilon=self.epsilon, data_format=layout
        )

    @paddle.no_grad()
    def keep(self, mean: paddle.Tensor, variance: paddle.Tensor, samples: paddle.Tensor) -> None:
        """Updates the running statistics with a batch's, unless all ranks have dummies: 0 `samples`."""
        for running, now in ((self._mean, mean), (self._variance, variance)):
            updated = self.momentum * running + (1 - self.momentum) * now
            running.set_value(paddle.where(samples > 0, updated, running))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.training or self._use_global_stats:
            if isinstance(self, nn.SyncBatchNorm):  # it has no CPU kernel, not even for evaluation
                return self.affine(x, self._mean, self._variance, self.weight, self.bias)
            return super(SyncBatchNorm, self).forward(x)  # noqa: UP008 - paddle.jit would go in circles
        weight = paddle.ones_like(self._mean) if self.weight is None else self.weight
        bias = paddle.zeros_like(self._mean) if self.bias is None else self.bias
        with paddle.amp.auto_cast(enable=False):  # which would cast the float32 moments
            normal = _Normalize.apply(x, weight, bias, self)
        return _append_activation_in_dygraph(normal, act=self.act)  # as paddle.nn.BatchNorm(act=…) does


def is_local(layer: nn.Layer) -> bool:
    """Whether a layer normalizes by the statistics of this rank's samples.

    A frozen one (in evaluation mode, or with `use_global_stats`) does not: all ranks use the same statistics.
    """
    return keeps_statistics(layer) and layer.training


def keeps_statistics(layer: nn.Layer) -> bool:
    """Whether a layer keeps running statistics of this rank's samples, or did before it was frozen."""
    local = isinstance(layer, _PADDLES) and not isinstance(layer, SyncBatchNorm)
    return local and not layer._use_global_stats


def is_batch_norm(layer: nn.Layer) -> bool:
    """Whether a layer is one of Paddle's BatchNorms or ours: local or not, frozen or not."""
    return isinstance(layer, _PADDLES)


def _has_trainable_statistics(layer: nn.Layer) -> bool:
    """Whether a layer is a paddle.nn.BatchNorm(trainable_statistics=True), which in evaluation, too, normalizes by the
    statistics of its batch."""
    return isinstance(layer, nn.BatchNorm) and layer._trainable_statistics and not layer._use_global_stats


@contextmanager
def by_running_statistics(model: nn.Layer) -> Iterator[None]:
    """Within it, all BatchNorms of a model normalize by their running statistics."""
    norms = [(x, x.training) for x in model.sublayers(include_self=True) if is_batch_norm(x)]
    trainable = [norm for norm, _ in norms if _has_trainable_statistics(norm)]
    for norm, _ in norms:
        norm.training = False
    for norm in trainable:
        norm._trainable_statistics = False
    try:
        yield
    finally:
        for norm, training in norms:
            norm.training = training
        for norm in trainable:
            norm._trainable_statistics = True


def _is_plain(layer: nn.Layer) -> bool:
    """Whether a layer is a local BatchNorm with the forward of a Paddle class, not one of a subclass or its own."""
    replaced = vars(layer).get("forward")
    is_paddles = replaced is None or getattr(replaced, "__func__", None) is forward
    return is_local(layer) and is_paddles and type(layer).forward in _FORWARDS


def forward(self: nn.SyncBatchNorm, x: paddle.Tensor) -> paddle.Tensor:
    """A local BatchNorm's forward, which model/batch_norm_on_cpu.py gives to Paddle's; both names: as in bias_on_cpu.py
    there."""
    settings = self._momentum, self._epsilon, self._data_format
    return paddle.nn.functional.batch_norm(
        x, self._mean, self._variance, self.weight, self.bias, self.training, *settings
    )


def synchronize(model: nn.Layer, mesh: ProcessGroup) -> nn.Layer:
    """Lets every BatchNorm within `model` normalize over these ranks, in place; also one that an earlier training let
    normalize over others.

    Skips frozen ones, and those with another forward, which `local_norms` still lists.
    """
    desynchronize(model)
    for index, layer in enumerate(filter(_is_plain, model.sublayers(include_self=True))):
        _synchronize(layer, mesh, index)
    return model


def _synchronize(layer: nn.Layer, mesh: ProcessGroup, index: int) -> None:
    vars(layer).pop("forward", None)  # the CPU's of Paddle's SyncBatchNorm
    layer.__class__ = type("SyncBatchNorm", (SyncBatchNorm, type(layer)), {})
    extend(layer, mesh, index)


def desynchronize(model: nn.Layer) -> None:
    """Gives every BatchNorm within `model` that `synchronize` has changed its own class back, in place."""
    for layer in model.sublayers(include_self=True):
        if isinstance(layer, SyncBatchNorm):
            layer.__class__ = type(layer).__bases__[1]
            for name in _ADDED:
                delattr(layer, name)


_ADDED = ("mesh", "index", "present", "epsilon", "momentum", "channels_last", "act")


def extend(layer: Any, mesh: ProcessGroup, index: int) -> None:
    """Adds a SyncBatchNorm's further attributes to a BatchNorm."""
    layer.mesh, layer.index, layer.present = mesh, index, True
    # Paddle's kernel takes float32: 1e-5 becomes 2.5e-13 less, and 0.9 becomes 2.4e-8 less.
    layer.epsilon, layer.momentum = (float(np.float32(x)) for x in (layer._epsilon, layer._momentum))
    layout = layer._data_layout if isinstance(layer, nn.BatchNorm) else layer._data_format
    layer.channels_last = layout.endswith("C") and layout != "NC"
    layer.act = layer._act if isinstance(layer, nn.BatchNorm) else None


def needs_ours(model: nn.Layer) -> bool:
    """Whether the model has a paddle.nn.SyncBatchNorm, which has no CPU kernel."""
    return any(isinstance(layer, nn.SyncBatchNorm) for layer in model.sublayers(include_self=True))


def statistics(model: nn.Layer) -> dict[str, paddle.Tensor]:
    """The running means and variances of BatchNorm layers by name; in Paddle they are parameters without gradient."""
    tensors: dict[str, paddle.Tensor] = {}
    for name, layer in model.named_sublayers(include_self=True):
        if is_batch_norm(layer):
            prefix = f"{name}." if name else ""
            tensors |= {f"{prefix}_mean": layer._mean, f"{prefix}_variance": layer._variance}
    return tensors


def local_norms(model: nn.Layer) -> list[str]:
    """The names of the layers that normalize over one rank's samples only."""
    return [name for name, layer in model.named_sublayers(include_self=True) if is_local(layer)]


SumOverReaders = Callable[[paddle.Tensor], paddle.Tensor]
"""The sum, over the readers, of a tensor that is equal on all ranks of a reader; in place or not. Collective."""


def _tensors(layers: Iterable[Any]) -> list[paddle.Tensor]:
    """The running mean and variance of each layer."""
    return [statistic for layer in layers for statistic in (layer._mean, layer._variance)]


class RunningStatistics:
    """The running statistics of a model on this rank. `sum_over_readers`: by default over all ranks of the mesh."""

    def __init__(self, model: nn.Layer, mesh: Mesh, sum_over_readers: SumOverReaders | None = None):
        self._model, self._mesh = model, mesh
        self._sum_over_readers = sum_over_readers or self._sum_over_mesh
        layers = [x for x in model.sublayers(include_self=True) if isinstance(x, SyncBatchNorm)]
        self.synchronized = {layer: (layer.mesh, layer.index) for layer in layers}

    def restore_norms(self) -> None:
        """Lets the BatchNorms normalize over this training's ranks: another Trainer.of of the model may have changed
        them since it was made."""
        desynchronize(self._model)
        for layer, (mesh, index) in self.synchronized.items():
            _synchronize(layer, mesh, index)

    def sync(self) -> None:
        """Averages the running statistics of local BatchNorms over all readers. Collective.

        Averages of running averages do not depend on how often they are taken. Training reads them only when a layer is
        frozen (`FrozenNorms` then calls this). So evaluation and checkpoints may call it at any time without changing
        the training. Other buffers are equal on all ranks already (`buffers`).
        """
        if self._mesh.ranks == 1:
            return
        with paddle.no_grad():
            for statistic in self._local():
                total = self._sum_over_readers(statistic.astype("float64"))
                mean = total / (self._mesh.dp_size - len(self._mesh.lost))
                statistic.set_value(mean.astype(statistic.dtype))

    def _local(self) -> list[paddle.Tensor]:
        """Running means and variances over this rank's samples, also of layers in evaluation mode."""
        return _tensors(
            layer for layer in self._model.sublayers(include_self=True) if keeps_statistics(layer)
        )

    def synchronized_tensors(self) -> list[paddle.Tensor]:
        """Running means and variances over the samples of all readers."""
        return _tensors(self.synchronized)

    def _sum_over_mesh(self, tensor: paddle.Tensor) -> paddle.Tensor:
        if not self._mesh.all_read:  # some ranks have no samples
            return self._mesh.sum_tensor(tensor if self._mesh.reads else paddle.zeros_like(tensor))
        return self._mesh.sum_tensor(tensor) * (self._mesh.dp_size / self._mesh.ranks)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context for a dummy micro-batch, which takes part in every exchange without changing running statistics."""
        backups = [(statistic, statistic.clone()) for statistic in self._local()]
        for norm in self.synchronized:
            norm.present = False
        try:
            yield
        finally:
            for norm in self.synchronized:
                norm.present = True
        with paddle.no_grad():
            for statistic, value in backups:
                statistic.set_value(value)
