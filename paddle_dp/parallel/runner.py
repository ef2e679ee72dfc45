"""Forward and backward of a batch's micro-batches on a placed model: to learn, to evaluate, and again to look for a
fault."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel import first_not_finite, gradient_digests
from paddle_dp.parallel.batch_norm import SyncBatchNorm
from paddle_dp.parallel.compiled import layer_by_layer, plain_forward
from paddle_dp.parallel.dropout import Draws, number_elements
from paddle_dp.parallel.gathered_samples import GatheredSamples
from paddle_dp.parallel.loss import Count, Loss, numbers
from paddle_dp.parallel.placed_model import PlacedModel
from paddle_dp.parallel.precision.amp import MixedPrecision
from paddle_dp.parallel.trial import trial
from paddle_dp.structure import call

Dropout = Literal["exact", "own"]
NOTHING = nullcontext()
Sums = dict[str, Any]  # of a micro-batch, by name: numbers, or tensors of one that no one has read yet


def totals(local_sums: Sequence[Sums], *extra: Any) -> tuple[dict[str, float], list[float]]:
    """The sums over micro-batches, by name, and further numbers, or tensors of one; a device is read once for all."""
    names = list(local_sums[0]) if local_sums else []
    values = iter(numbers([*(row[name] for name in names for row in local_sums), *extra]))
    return {name: sum(islice(values, len(local_sums))) for name in names}, list(values)


@dataclass(frozen=True, kw_only=True)
class Score:
    """The loss and its scores for `samples` samples: `sums` by name, and their `count`. `outputs`: this rank's part;
    `targets` [n, …]."""

    outputs: Any
    targets: paddle.Tensor
    sums: dict[str, float]
    count: float
    samples: int


@dataclass(kw_only=True)
class MicroBatchRunner(PlacedModel):
    """A placed model that computes batches: forward and loss of each micro-batch, and backward into the gradients.

    `parallel_model` is what runs forward on this rank: `model` itself, or a wrapper (paddle.DataParallel, a pipeline's
    engine). The wrapper's all-reduce *averages* over `dp_world_size` ranks, which a factor undoes. `dropout`: `exact`
    draws the masks of one process.
    """

    parallel_model: nn.Layer
    loss: Loss
    mixed: MixedPrecision
    dp_world_size: int = 1
    dropout: Dropout = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainable = [p for p in self.model.parameters() if not p.stop_gradient]
        self._norms = [layer for layer in self.model.sublayers() if isinstance(layer, SyncBatchNorm)]
        self._exchanges = True  # in the last backward of a batch, where that is when gradients are exchanged
        self._weights: dict[float, paddle.Tensor] = {}
        self._compare_across()
        number_elements(self.elements())
        self._draws = Draws(exact=self.dropout == "exact")

    def _compare_across(self) -> None:
        """Lets a loss that compares samples compare those of all ranks. Collective."""
        if self.loss.compares == "ranks" and self.mesh.dp_size > 1:
            self.loss = self.loss.across(self._gathered_samples())

    def _gathered_samples(self) -> GatheredSamples:
        """The samples of the ranks that hold the same part of the model. Collective."""
        return GatheredSamples(range(self.mesh.ranks), self.mesh.rank, self.mesh)

    def _forward_backward(
        self, batch: Batch, divisor: float, collect_metrics: bool
    ) -> tuple[list[Sums], Count]:
        """Forward and backward of every micro-batch's total / divisor.

        Returns the sums of each (empty without `collect_metrics`), and the loss's count over all of them.
        """
        local_sums: list[Sums] = []
        counted: Count = 0
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            last = number == len(batch.micro_batches) and self._exchanges
            with self._dummy() if micro_batch.is_dummy else NOTHING, self._no_sync(not last):
                with self._draws.around(batch, micro_batch, self.named_layers):
                    outputs, total, count = self._forward(micro_batch)
                heartbeat.enter("backward")
                waiting = last and self.dp_world_size > 1
                with (
                    self.mixed.backward_context(),
                    self._waiting_for_exchange() if waiting else NOTHING,
                    self._exchanging(last),
                ):
                    total.backward(self._weight(total, self._factor(micro_batch, divisor)))
            counted = counted if micro_batch.is_dummy else counted + count
            if collect_metrics or not last:
                heartbeat.enter("forward")
            if collect_metrics:
                local_sums.append(self._sums(outputs, total, micro_batch))
        return local_sums, counted

    def _forward(self, micro_batch: MicroBatch) -> tuple[Any, paddle.Tensor, Count]:
        with self.mixed.context(), self.loss.present(not micro_batch.is_dummy):
            outputs = call(self.parallel_model, micro_batch.inputs, plain_forward(self.model))
            total, count = self.loss(outputs, micro_batch.targets)
        return outputs, total, count

    def _factor(self, micro_batch: MicroBatch, divisor: float) -> float:
        """The factor of this micro-batch's total in the backward: 0 for a dummy, else its weight in the global mean."""
        if micro_batch.is_dummy:
            return 0.0
        scale = self.mixed.scale.scale if self.mixed.scale else 1.0
        return scale * (1 if self.mixed.low else self.dp_world_size) / divisor

    def _weight(self, total: paddle.Tensor, factor: float) -> paddle.Tensor:
        """`factor` as the gradient from which the backward of `total` starts; cheaper than `total * factor`."""
        weight = self._weights.get(factor)
        if weight is None or weight.dtype is not total.dtype:
            # The cache is for factors that repeat; loss scales and counts may not.
            if len(self._weights) > 16:
                self._weights.clear()
            weight = self._weights[factor] = paddle.full(total.shape, factor, total.dtype)
        return weight

    def _sums(self, outputs: Any, total: paddle.Tensor, micro_batch: MicroBatch) -> Sums:
        """This micro-batch's sums by name; zeros for a dummy, and on ranks that do not count."""
        with self.loss.present(not micro_batch.is_dummy):
            sums = self.loss.sums(outputs, micro_batch.targets, total)
        counts = self.mesh.is_loss_rank and not micro_batch.is_dummy
        return {name: value if counts else 0.0 for name, value in sums.items()}

    @cached_property
    def _named_trainable(self) -> list[tuple[str, paddle.Tensor]]:
        """Asked for in each update, and looked up once: that takes 0.4 ms in a GPT of 24 blocks."""
        return self.named_parameters(trainable=True)

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        """Disables DataParallel's exchange while more micro-batches follow; the last backward exchanges everything."""
        wrapper = self.parallel_model
        return wrapper.no_sync() if more_to_come and isinstance(wrapper, paddle.DataParallel) else NOTHING

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's backward, `last` of an update, and no more: gradients of a backward that runs within
        forward (of an adversary's) are its own affair. Here nothing."""
        return NOTHING

    def _waiting_for_exchange(self) -> AbstractContextManager[None]:
        """Around the backward in which DataParallel exchanges the gradients."""
        return self.mesh.waiting("the exchange of gradients", computes=True)

    def _finish_exchange(self) -> None:
        """After a backward: ends the exchanges that it began; here nothing. Collective."""

    @contextmanager
    def _dummy(self) -> Iterator[None]:
        """Around a dummy micro-batch: it takes part in every exchange and does not change running statistics."""
        backups = [(statistic, statistic.clone()) for statistic in self._local_statistics()]
        for norm in self._norms:
            norm.present = False
        try:
            yield
        finally:
            for norm in self._norms:
                norm.present = True
        with paddle.no_grad():
            for statistic, value in backups:
                statistic.set_value(value)

    def score(self, micro_batch: MicroBatch) -> Score | None:
        """The loss and scores of these samples, in the model's current mode and without gradients.

        None for a dummy, and on a rank whose stage does not have the outputs. All ranks of a reader call it together;
        those for which `mesh.is_loss_rank` is false get the same sums as the one that counts.
        """
        micro_batch = self.mixed.cast_micro_batch(micro_batch)
        outputs = self.predict(micro_batch.inputs)
        if outputs is None or (micro_batch.is_dummy and self.loss.compares != "ranks"):
            return None
        with paddle.no_grad(), self.loss.present(not micro_batch.is_dummy):
            total, count = self.loss(outputs, micro_batch.targets)
            sums = self.loss.sums(outputs, micro_batch.targets, total)
        if micro_batch.is_dummy:
            return None
        *values, count = numbers([*sums.values(), count])
        return Score(
            outputs=outputs,
            targets=micro_batch.targets,
            sums=dict(zip(sums, values, strict=True)),
            count=count,
            samples=micro_batch.samples,
        )

    def predict(self, inputs: Any) -> Any:
        """The model's outputs without gradients, in the recipe's precision. Collective if `predict_is_collective`."""
        with paddle.no_grad(), self.mixed.context():
            return call(self.model, inputs, plain_forward(self.model))

    @property
    def predict_is_collective(self) -> bool:
        """Whether all readers must call every `predict` together, because it gathers weights from other ranks."""
        return False

    @property
    def score_is_collective(self) -> bool:
        """Whether all readers must call every `score` together, also with a dummy."""
        return self.predict_is_collective or self.loss.compares == "ranks"

    def find_not_finite(self, batch: Batch) -> str:
        """A sentence on the first output, in the model's order, that is not finite in one more forward of this batch;
        "" if all are finite. Nothing is changed. Collective, and the same on every rank."""
        batch, outputs = self.mixed.cast_batch(batch), first_not_finite.NotFiniteOutputs()
        blocks = self._blocks_of_layers()
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            with (
                trial(self.model),
                layer_by_layer(self.model),
                self._dummy() if micro_batch.is_dummy else NOTHING,
                outputs.watched(self.named_layers(), blocks, number, self._differing_layers()),
            ):
                if not micro_batch.is_dummy:
                    outputs.add(first_not_finite.INPUTS, micro_batch.inputs, -1, number)
                total, _ = self._recompute_forward(micro_batch, batch)
                outputs.add(first_not_finite.LOSS, total, sys.maxsize, number)
        return first_not_finite.first(outputs.not_finite, self.mesh)

    def _blocks_of_layers(self) -> dict[int, int]:
        """The number of the block that a layer is in, by its id, where ranks run different blocks: all of them call
        their layers in the order of these numbers."""
        return {}

    def _differing_layers(self) -> Container[int]:
        """The ids of this rank's layers that other ranks of the same forward do not run."""
        return ()

    def shared_batch(self, batch: Batch) -> Batch:
        """A batch of which every rank has the same samples: those of the last rank. Collective."""
        return gradient_digests.shared(self.mixed.cast_batch(batch), self.mesh)

    def recompute_gradients(self, batch: Batch) -> dict[str, list[int]]:
        """Digests of the gradients that this rank computes from its samples of a batch, by parameter, before any
        exchange. Nothing is changed. Collective."""
        with gradient_digests.watched(self._named_trainable) as found:
            self.compute_without_exchange(batch)
        return dict(sorted(found.items()))

    def compute_without_exchange(self, batch: Batch) -> None:
        """Forward and backward of a batch, in which no gradient is exchanged. Nothing is changed. Collective."""
        self._exchanges = False
        try:
            with gradient_digests.untouched(self.model, self.loss.owner), self.loss.alone():
                self._forward_backward(batch, batch.samples, False)
                self._finish_exchange()
        finally:
            self._exchanges = True
        for parameter in self.trainable:
            parameter.clear_gradient(False)

    def _recompute_forward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[paddle.Tensor, Count]:
        """Forward and loss of samples of `batch`, with the same dropout masks as before."""
        present = self.loss.present(not micro_batch.is_dummy)
        with self._draws.scope(batch, micro_batch), self.mixed.context(), present:
            outputs = call(self.model, micro_batch.inputs, plain_forward(self.model))
            return self.loss(outputs, micro_batch.targets)
