"""The running statistics of BatchNorms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import paddle
from paddle import nn

from paddle_dp.core.batch_norm import SyncBatchNorm, keeps_statistics
from paddle_dp.mesh import Mesh

SumOverReaders = Callable[[paddle.Tensor], paddle.Tensor]
"""The sum, over the readers, of a tensor that is equal on all ranks of a reader; in place or not. Collective."""


class RunningStatistics:
    """The running statistics of a model on this rank. `sum_over_readers`: by default over all ranks of the mesh."""

    def __init__(self, model: nn.Layer, mesh: Mesh, sum_over_readers: SumOverReaders | None = None):
        self._model, self._mesh = model, mesh
        self._sum_over_readers = sum_over_readers or self._sum_over_mesh
        self.synchronized = [layer for layer in model.sublayers() if isinstance(layer, SyncBatchNorm)]

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
        layers = [layer for layer in self._model.sublayers(include_self=True) if keeps_statistics(layer)]
        return [statistic for layer in layers for statistic in (layer._mean, layer._variance)]

    def _sum_over_mesh(self, tensor: paddle.Tensor) -> paddle.Tensor:
        if self._mesh.axes.servers:  # servers have no samples
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
