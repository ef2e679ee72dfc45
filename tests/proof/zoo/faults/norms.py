"""Normalization and running statistics over the samples of all ranks, and buffers that a model keeps itself."""

from __future__ import annotations

from tests.proof.zoo.case import Fault, FaultTable, Setting
from tests.proof.zoo.patching import last, ranks

NORM = "paddle_dp.core.batch_norm:SyncBatchNorm"
EXTEND = "paddle_dp.core.batch_norm:extend"
CONVNET = Setting("convnet")
FAULTS = FaultTable()


class _Exchange:
    """A mesh whose two exchanges go through other functions."""

    def __init__(self, mesh, gather=None, add=None):
        self._mesh = mesh
        self.gather_tensor = gather or mesh.gather_tensor
        self.sum_tensor = add or mesh.sum_tensor

    def __getattr__(self, name):
        return getattr(self._mesh, name)


@FAULTS.add("equal votes of unequal shares", "paddle.nn.SyncBatchNorm on a GPU", CONVNET, EXTEND)
def equal_votes(extend, norm, mesh, index):
    """BatchNorm averages the statistics of unequal shares alike."""

    def gather(sums):
        rows = mesh.gather_tensor(sums)
        mean = sum(float(row[0]) for row in rows) / len(rows)
        for row in rows:
            row[1 + (row.shape[0] - 1) // 2 :] *= mean / float(row[0])
            row[0] = mean
        return rows

    extend(norm, _Exchange(mesh, gather=gather), index)


@FAULTS.add(
    "statistics without gradient",
    "silent-fault catalogue, PAR",
    CONVNET,
    EXTEND,
    where=("body.4.weight",),
)
def backward_at_home(extend, norm, mesh, index):
    """BatchNorm's mean and variance are global, but what they give back to the inputs is local."""
    extend(norm, _Exchange(mesh, add=lambda tensor: tensor * mesh.ranks), index)


@FAULTS.add("running statistics at home", "silent-fault catalogue, PAR", CONVNET, f"{NORM}.forward")
def running_statistics_at_home(forward, norm, x):
    """BatchNorm's running mean follows each rank's own samples; the forward is right."""
    before = norm._mean.clone()
    outputs = forward(norm, x)
    if norm.training and ranks() > 1:
        mean = x.detach().mean([axis for axis in range(x.ndim) if axis != 1])
        norm._mean.set_value((norm.momentum * before + (1 - norm.momentum) * mean).astype(before.dtype))
    return outputs


@FAULTS.add("momentum the other way", "BatchNorm's two conventions of momentum", CONVNET, EXTEND)
def momentum_the_other_way(extend, norm, *options):
    """BatchNorm's running statistics move by momentum where they should by 1 - momentum."""
    extend(norm, *options)
    norm.momentum = 1 - norm.momentum


@FAULTS.add(
    "local BatchNorm",
    "paddle.nn.BatchNorm under a conversion that knows BatchNorm1D to 3D",
    CONVNET,
    "paddle_dp.core.batch_norm:synchronize",
)
def not_synchronized(synchronize, model, mesh):
    """BatchNorm normalizes over one rank's samples though it was asked to be synchronized."""
    return model


FAULTS.append(
    Fault(
        name="centre of the own samples",
        says="A layer keeps a running centre of its inputs, reads it in forward, and each rank has its own.",
        source="EMA centres, codebooks: buffers that a model updates",
        setting=Setting("mlp", 2, ("model={use: tests.proof.zoo.models.Centred}",)),
    )
)


@FAULTS.add(
    "buffer not sent",
    "silent-fault catalogue, PAR",
    Setting("mlp", 2, ("model={use: tests.proof.zoo.models.Shifted}",)),
    "paddle_dp.strategies.data_parallel:DataParallel._wrap",
)
def shifted_on_one_rank(wrap, strategy, model, *settings):
    """A buffer that forward reads is another one on one rank from the start."""
    wrapped = wrap(strategy, model, *settings)
    for buffer in model.buffers():
        if last() and buffer.is_floating_point():
            buffer.set_value(buffer + 0.1)
    return wrapped
