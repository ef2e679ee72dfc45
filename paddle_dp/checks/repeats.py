"""Computes a batch once more on a learner's model, to find a fault or to measure, and restores its state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch, leaves, structure_of, unflatten
from paddle_dp.core import first_not_finite
from paddle_dp.core.batch_norm import SyncBatchNorm
from paddle_dp.core.buffers import bits_of, from_bits
from paddle_dp.core.consistency import digests
from paddle_dp.core.extra_forwards import buffers_before, extra_forwards
from paddle_dp.core.loss import copied
from paddle_dp.core.precision import NOTHING
from paddle_dp.model.compiled import layer_by_layer
from paddle_dp.tensors import dtype_of

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


def find_not_finite(learner: Learner, batch: Batch) -> str:
    """Repeats the forward of this batch. Returns a sentence on the first output, in the model's order, that is not
    finite; "" if all are finite. Collective, and the same on every rank."""
    placed, runner = learner.placed, learner.runner
    batch, outputs = learner.mixed.cast_batch(batch), first_not_finite.NotFiniteOutputs()
    blocks = placed.names.blocks_of_layers()
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        with (
            extra_forwards(placed.model),
            layer_by_layer(placed.model),
            learner.statistics.unchanged() if micro_batch.is_dummy else NOTHING,
            outputs.watched(placed.named_layers(), blocks, number, placed.rank_local_layers),
        ):
            if not micro_batch.is_dummy:
                outputs.add(first_not_finite.INPUTS, micro_batch.inputs, -1, number)
            total, _ = runner.repeat_forward(micro_batch, batch)
            outputs.add(first_not_finite.LOSS, total, sys.maxsize, number)
    return first_not_finite.first(outputs.not_finite, learner.mesh)


def recompute_gradients(learner: Learner, batch: Batch) -> dict[str, list[int]]:
    """Digests of the gradients that this rank computes from its samples of a batch, by parameter, before any exchange.
    Collective."""
    with _watched(learner.placed.named_trainable) as digests_by_name:
        compute_without_exchange(learner, batch)
    return dict(sorted(digests_by_name.items()))


def compute_without_exchange(learner: Learner, batch: Batch) -> None:
    """Runs forward and backward of a batch without exchanging gradients. Collective."""
    # With copies: a loss may write into its targets.
    batch = replace(
        batch, micro_batches=tuple(replace(x, targets=copied(x.targets)) for x in batch.micro_batches)
    )
    with _untouched(learner.model, learner.loss.owner), learner.loss.alone():
        learner.run(batch, batch.samples, learner.exchange, collect=False, final=False)
        learner.exchange.discard()
    for parameter in learner.trainable:
        parameter.clear_gradient(False)


Named = Iterable[tuple[str, paddle.Tensor]]
SEED = 20221


def shared_batch(learner: Learner, batch: Batch) -> Batch:
    """The last rank's samples of a batch, on every rank: the last rank always has some. Collective."""
    batch, mesh = learner.mixed.cast_batch(batch), learner.mesh
    if mesh.ranks == 1:
        return batch
    source, micro_batches = mesh.ranks - 1, []
    rows = mesh.gather([_row(micro_batch) for micro_batch in batch.micro_batches])[source]
    for micro_batch, (specs, samples, first, positions) in zip(batch.micro_batches, rows, strict=True):
        read = (micro_batch.inputs, micro_batch.targets)
        inputs, targets = unflatten(
            structure_of(read),
            [
                _broadcast(tensor if mesh.rank == source else paddle.zeros(shape, dtype), source)
                for tensor, (shape, dtype) in zip(leaves(read), specs, strict=True)
            ],
        )
        micro_batches.append(
            MicroBatch(inputs, targets, samples, first, None if positions is None else tuple(positions))
        )
    return replace(batch, micro_batches=tuple(micro_batches))


def _row(micro_batch: MicroBatch) -> list[object]:
    read = leaves((micro_batch.inputs, micro_batch.targets))
    specs = [[list(x.shape), dtype_of(x)] for x in read]
    return [specs, micro_batch.samples, micro_batch.first, micro_batch.places]


@paddle.no_grad()
def _broadcast(tensor: paddle.Tensor, source: int) -> paddle.Tensor:
    """The source's tensor, on every rank. Collective."""
    bits = bits_of(tensor)
    dist.broadcast(bits, source)
    return from_bits(bits, tensor)


@contextmanager
def _watched(named: Named) -> Iterator[dict[str, list[int]]]:
    """Within the block, records digests of each parameter's gradient, before it is accumulated or sent: two numbers per
    backward."""
    digests_by_name: dict[str, list[int]] = {}

    def hook(name: str, gradient: paddle.Tensor) -> None:
        digests_by_name.setdefault(name, []).extend(digests([gradient])[0])

    handles = [
        parameter.register_hook(lambda gradient, name=name: hook(name, gradient)) for name, parameter in named
    ]
    try:
        yield digests_by_name
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(model: nn.Layer, loss: object) -> Iterator[None]:
    """Wraps forwards and backwards: restores buffers, running statistics and generators afterwards.

    Within it, random numbers are the same on every rank, and SyncBatchNorm uses its running statistics, to avoid its
    exchange.
    """
    undo = buffers_before(model, loss)
    generators = paddle.get_rng_state(), np.random.get_state(), random.getstate()
    layers = model.sublayers(include_self=True)
    norms = [layer for layer in layers if isinstance(layer, SyncBatchNorm) and layer.training]
    for norm in norms:
        norm.training = False
    paddle.seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
        undo()
        paddle.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])
