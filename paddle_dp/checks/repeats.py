"""Computes a batch once more on a learner's model, to find a fault or to measure, and restores its state."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paddle_dp.batch import Batch
from paddle_dp.checks import gradient_digests
from paddle_dp.core import first_not_finite
from paddle_dp.core.trial import trial
from paddle_dp.exchange.gradient_exchange import NOTHING
from paddle_dp.model.compiled import layer_by_layer

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
            trial(placed.model),
            layer_by_layer(placed.model),
            learner.statistics.unchanged() if micro_batch.is_dummy else NOTHING,
            outputs.watched(placed.named_layers(), blocks, number, placed.rank_local_layers),
        ):
            if not micro_batch.is_dummy:
                outputs.add(first_not_finite.INPUTS, micro_batch.inputs, -1, number)
            total, _ = runner.repeat_forward(micro_batch, batch)
            outputs.add(first_not_finite.LOSS, total, sys.maxsize, number)
    return first_not_finite.first(outputs.not_finite, learner.mesh)


def shared_batch(learner: Learner, batch: Batch) -> Batch:
    """A batch with the last rank's samples on every rank. Collective."""
    return gradient_digests.shared(learner.mixed.cast_batch(batch), learner.mesh)


def recompute_gradients(learner: Learner, batch: Batch) -> dict[str, list[int]]:
    """Digests of the gradients that this rank computes from its samples of a batch, by parameter, before any exchange.
    Collective."""
    with gradient_digests.watched(learner.placed.named_trainable) as digests_by_name:
        compute_without_exchange(learner, batch)
    return dict(sorted(digests_by_name.items()))


def compute_without_exchange(learner: Learner, batch: Batch) -> None:
    """Runs forward and backward of a batch without exchanging gradients. Collective."""
    with gradient_digests.untouched(learner.model, learner.loss.owner), learner.loss.alone():
        learner.run(batch, batch.samples, collect=False, final=False)
        learner.exchange.discard()
    for parameter in learner.trainable:
        parameter.clear_gradient(False)
