"""Normalization and running statistics over the samples of all ranks, and buffers that a model keeps itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.proof.zoo.case import Fault, Setting
from tests.proof.zoo.patching import last, ranks, replaced

NORM = "paddle_dp.core.batch_norm"


class _Exchange:
    """A mesh whose two exchanges go through other functions."""

    def __init__(self, mesh: Any, gather: Any = None, add: Any = None):
        self._mesh = mesh
        self.gather_tensor = gather or mesh.gather_tensor
        self.sum_tensor = add or mesh.sum_tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mesh, name)


def through(exchange: Callable[[Any], _Exchange]) -> AbstractContextManager[None]:
    """Every SyncBatchNorm exchanges through `exchange(mesh)`."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, local, mesh, *index: init(self, local, exchange(mesh), *index)

    return replaced(f"{NORM}:SyncBatchNorm.__init__", make)


def equal_votes() -> AbstractContextManager[None]:
    """Statistics of unequal shares are averaged alike, as by paddle.nn.SyncBatchNorm on a GPU."""

    def alike(mesh: Any) -> _Exchange:
        def gather(told: Any) -> list[Any]:
            rows = mesh.gather_tensor(told)
            mean = sum(float(row[0]) for row in rows) / len(rows)
            for row in rows:
                row[1 + (row.shape[0] - 1) // 2 :] *= mean / float(row[0])
                row[0] = mean
            return rows

        return _Exchange(mesh, gather=gather)

    return through(alike)


def backward_at_home() -> AbstractContextManager[None]:
    """Forward over all ranks; what the statistics give back to the inputs is of the own samples only."""
    return through(lambda mesh: _Exchange(mesh, add=lambda tensor: tensor * mesh.ranks))


def running_statistics_at_home() -> AbstractContextManager[None]:
    """The forward is right; the running statistics follow the own samples."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def drifting(self: Any, x: Any) -> Any:
            kept = self._mean.clone()
            found = forward(self, x)
            if self.training and ranks() > 1:
                axes = [axis for axis in range(x.ndim) if axis != 1]
                mean = x.detach().mean(axes)
                self._mean.set_value((self.momentum * kept + (1 - self.momentum) * mean).astype(kept.dtype))
            return found

        return drifting

    return replaced(f"{NORM}:SyncBatchNorm.forward", make)


def momentum_the_other_way() -> AbstractContextManager[None]:
    """The running variance moves by momentum instead of by 1 - momentum: another library's convention."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def turned(self: Any, local: Any, mesh: Any, *index: int) -> None:
            init(self, local, mesh, *index)
            self.momentum = 1 - self.momentum

        return turned

    return replaced(f"{NORM}:SyncBatchNorm.__init__", make)


def not_synchronized() -> AbstractContextManager[None]:
    """One kind of BatchNorm is passed over when the others are made global."""
    return replaced("paddle_dp.core.batch_norm:synchronize", lambda synchronize: lambda model, mesh: model)


def buffer_of_the_own_samples() -> AbstractContextManager[None]:
    return nullcontext()  # the model itself is at fault: tests.proof.zoo.models:Centred


def shifted_on_one_rank() -> AbstractContextManager[None]:
    """A buffer that forward reads is another one on the last rank: it was not sent with the weights."""

    def make(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, model: Any) -> Any:
            found = wrap(self, model)
            for buffer in model.buffers():
                if last() and buffer.is_floating_point():
                    buffer.set_value(buffer + 0.1)
            return found

        return wrapped

    return replaced("paddle_dp.strategies.data_parallel:DataParallel._wrap", make)


CONVNET = Setting("convnet")
FAULTS = (
    Fault(
        name="equal votes of unequal shares",
        says="BatchNorm averages the statistics of unequal shares alike.",
        source="paddle.nn.SyncBatchNorm on a GPU",
        setting=CONVNET,
        patch=equal_votes,
    ),
    Fault(
        name="statistics without gradient",
        says="BatchNorm's mean and variance are global, but what they give back to the inputs is local.",
        source="silent-fault catalogue, PAR",
        setting=CONVNET,
        patch=backward_at_home,
        where=("body.4.weight",),
    ),
    Fault(
        name="running statistics at home",
        says="BatchNorm's running mean follows each rank's own samples; the forward is right.",
        source="silent-fault catalogue, PAR",
        setting=CONVNET,
        patch=running_statistics_at_home,
    ),
    Fault(
        name="momentum the other way",
        says="BatchNorm's running statistics move by momentum where they should by 1 - momentum.",
        source="BatchNorm's two conventions of momentum",
        setting=CONVNET,
        patch=momentum_the_other_way,
    ),
    Fault(
        name="local BatchNorm",
        says="BatchNorm normalizes over one rank's samples though it was asked to be synchronized.",
        source="paddle.nn.BatchNorm under a conversion that knows BatchNorm1D to 3D",
        setting=CONVNET,
        patch=not_synchronized,
    ),
    Fault(
        name="centre of the own samples",
        says="A layer keeps a running centre of its inputs, reads it in forward, and each rank has its own.",
        source="EMA centres, codebooks: buffers that a model updates",
        setting=Setting("mlp", 2, ("model={use: tests.proof.zoo.models.Centred}",)),
        patch=buffer_of_the_own_samples,
    ),
    Fault(
        name="buffer not sent",
        says="A buffer that forward reads is another one on one rank from the start.",
        source="silent-fault catalogue, PAR",
        setting=Setting("mlp", 2, ("model={use: tests.proof.zoo.models.Shifted}",)),
        patch=shifted_on_one_rank,
    ),
)
