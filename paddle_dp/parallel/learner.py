"""A learner: a placed model, its optimizer and its schedule; makes one update from one global batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.errors import LossError, NotFiniteError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel import first_not_finite, gradients, gradients_again
from paddle_dp.parallel.attributes import Attributes
from paddle_dp.parallel.batch_norm import SyncBatchNorm, is_local, keeps_statistics
from paddle_dp.parallel.buffers import Buffers
from paddle_dp.parallel.compiled import layer_by_layer, plain_forward
from paddle_dp.parallel.consistency import check_gradients
from paddle_dp.parallel.dropout import Draws, number_elements
from paddle_dp.parallel.finite import not_finite
from paddle_dp.parallel.given_optimizer import parameters_of
from paddle_dp.parallel.gradient_sketch import Sketches, sketches
from paddle_dp.parallel.learning_rate import Rate
from paddle_dp.parallel.loss import Count, Loss, number, numbers
from paddle_dp.parallel.missing_gradients import MissingGradients
from paddle_dp.parallel.optimizer_memory import OptimizerMemory
from paddle_dp.parallel.placed_model import PlacedModel
from paddle_dp.parallel.precision.amp import MixedPrecision
from paddle_dp.parallel.samplewise import Samplewise
from paddle_dp.parallel.trainable import Trainable
from paddle_dp.parallel.trial import buffers_before, trial
from paddle_dp.structure import call

if TYPE_CHECKING:
    from paddle_dp.parallel.pipeline.timeline import Recorder

Dropout = Literal["exact", "own"]
Accept = Callable[[Mapping[str, float]], bool]
"""Whether an update is to be made, by its metrics; the same answer on every rank."""
Sums = dict[str, Any]  # of a micro-batch, by name: numbers, or tensors of one that no one has read yet


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
class Learner(PlacedModel):
    """A placed model and its optimizer, which make one update from each global batch; this process has its share of it.

    The gradient of an update is the one-process gradient. With any number of micro-batches and ranks, each backward
    runs on total / (global count), and gradients are summed over micro-batches and ranks; so unequal shares are as
    exact as equal ones. Where the count is only known from the loss's call, each backward runs on total / (global
    samples), and the all-reduced gradients are multiplied by samples / count. If nothing in a batch counts, no update
    is made, and `empty` is true until the next one.

    `parallel_model` is what runs forward on this rank: `model` itself, or a wrapper (paddle.DataParallel, a pipeline's
    engine). The wrapper's all-reduce *averages* over `dp_world_size` ranks, which a factor undoes. `dropout`: `exact`
    draws the masks of one process. `noticed`: sentences on differences from one process that were known before.
    `values_may_travel`: after an update other ranks' new parameters may still be on their way, for the next forward
    waits for them layer by layer; who sets it calls `settle` before anybody else reads a parameter.
    `faulty_gradients`: this rank's gradients that were not finite in the last update with metrics, and their contents.
    """

    parallel_model: nn.Layer
    loss: Loss
    optimizer: paddle.optimizer.Optimizer
    schedule: paddle.optimizer.lr.LRScheduler | None
    mixed: MixedPrecision
    dp_world_size: int = 1
    dropout: Dropout = "exact"
    faulty_gradients: dict[str, str] = field(default_factory=dict, init=False)
    recorder: Recorder | None = field(default=None, init=False)  # under a pipeline: times of its stages
    empty: bool = field(default=False, init=False)
    values_may_travel: bool = field(default=False, init=False)
    noticed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trainable = [p for p in self.model.parameters() if not p.stop_gradient]
        self._placed_trainable = Trainable(self.named_parameters())
        updated = {id(p) for p in parameters_of(self.optimizer)}
        self._not_updated = [p for p in self.trainable if id(p) not in updated]  # here: another rank may
        self._norms = [layer for layer in self.model.sublayers() if isinstance(layer, SyncBatchNorm)]
        self._gradients_checked = False
        self._exchanges = True  # in the last backward of a batch, where that is when gradients are exchanged
        self._absent = MissingGradients(self.mesh)
        self._weights: dict[float, paddle.Tensor] = {}
        self.rate = Rate(self.optimizer, self.schedule)
        number_elements(self.elements())
        self._draws = Draws(exact=self.dropout == "exact")
        self._synced_buffers = Buffers(self.named_buffers, self.mesh, self._same_buffers())
        self._samplewise = Samplewise(self.loss, self.model)
        self._tried: Batch | None = (
            None  # the batch of the samples that are kept for trials, without its data
        )
        self._optimizer_memory = OptimizerMemory(self.optimizer)
        layers = {f"model.{name}".rstrip("."): layer for name, layer in self.named_layers()}
        owner = self.loss.owner
        loss = {} if owner is None or any(owner is layer for layer in layers.values()) else {"loss": owner}
        self._attributes = Attributes({**layers, **loss, "schedule": self.schedule})
        self._may_be_local = [(name, layer) for name, layer in self.named_layers() if keeps_statistics(layer)]
        self._local: frozenset[str] = frozenset()  # names of BatchNorms that are local in this update
        self._ever_local: frozenset[str] = frozenset()

    def lost_of_optimizer(self) -> list[str]:
        """The attributes of a user's optimizer that training has changed and checkpoints do not save. Collective."""
        return self._gather_names(self._optimizer_memory.lost())

    def lost_attributes(self) -> list[str]:
        """The attributes of a user's layers, loss and schedule that training has changed and checkpoints do not save,
        such as «model.encoder.calls». Collective."""
        return self._gather_names(self._attributes.changed())

    def train_batch(
        self, batch: Batch, collect_metrics: bool = False, accept: Accept | None = None
    ) -> dict[str, float] | None:
        """One update from one global batch. Collective.

        With `collect_metrics`, returns `loss` and the loss's scores, means over the global batch, and `gradient_norm`,
        the 2-norm of the whole model's gradients before clipping; the same numbers on every rank. They cost one read
        from the device, which is otherwise not waited for, and one small exchange. If nothing in the batch counts,
        means are NaN and `gradient_norm` is 0.
        `accept` is asked with these metrics before anything is updated, unless nothing counts. If it refuses, weights,
        optimizer states, running statistics and buffers stay what they were; the schedule goes on.

        Raises LossError when the loss does not return its count, DivergenceError when a gradient is not exchanged,
        NotFiniteError when float16 cannot hold the gradients at any loss scale.
        """
        heartbeat.enter("forward")
        undo = buffers_before(self.model, self.loss.owner) if accept else None
        batch = self.mixed.cast_batch(batch)
        self._begin()
        if self.mesh.ranks > 1:
            self._placed_trainable.check(self._may_freeze)
        self._look_for_frozen()
        known = self.count_ahead(batch)
        divisor = batch.samples if known is None else known or 1.0
        seen, answered = self._forward_backward(batch, divisor, collect_metrics or accept is not None)
        heartbeat.enter("exchange")
        self._all_reduce_gradients()
        count = self._global_count(answered) if known is None else known
        self.empty = count == 0
        usable = not self.empty and self._unscale(divisor / count)
        metrics = self._metrics(seen, count) if collect_metrics or accept else None
        heartbeat.enter("update")
        if accept and undo and metrics is not None and not self.empty and not accept(metrics):
            undo()
        elif usable:
            self._step()
        if parameters_of(self.optimizer):  # a stage may have none of them, and Paddle's asks for the first
            self.optimizer.clear_grad(set_to_zero=False)
        for parameter in self._not_updated:
            parameter.clear_gradient(False)
        self.rate.step()
        self._draws.gather_findings(self.mesh)
        self._synced_buffers.sync()
        return metrics

    def leave_out(self) -> None:
        """Counts an update without making it: the schedule goes on, and nothing else changes. Collective."""
        self.empty = False
        self.rate.step()
        self._synced_buffers.sync()

    def find_not_finite(self, batch: Batch) -> str:
        """A sentence on the first output, in the model's order, that is not finite in one more forward of this batch;
        "" if all are finite. Nothing is changed. Collective, and the same on every rank."""
        batch, outputs = self.mixed.cast_batch(batch), first_not_finite.Outputs()
        blocks = self._blocks_of_layers()
        for place, micro_batch in enumerate(batch.micro_batches, start=1):
            with (
                trial(self.model),
                layer_by_layer(self.model),
                self._dummy() if micro_batch.is_dummy else nullcontext(),
                outputs.watched(self.named_layers(), blocks, place),
            ):
                if not micro_batch.is_dummy:
                    outputs.add(first_not_finite.INPUTS, micro_batch.inputs, -1, place)
                total, _ = self._forward_again(micro_batch, batch)
                outputs.add(first_not_finite.LOSS, total, sys.maxsize, place)
        return first_not_finite.first(outputs.found, self.mesh)

    def shared_batch(self, batch: Batch) -> Batch:
        """A batch of which every rank has the same samples: those of the last rank. Collective."""
        return gradients_again.shared(self.mixed.cast_batch(batch), self.mesh)

    def gradients_again(self, batch: Batch) -> dict[str, list[int]]:
        """Digests of the gradients that this rank computes from its samples of a batch, by parameter, before any
        exchange. Nothing is changed. Collective."""
        with gradients_again.watched(self._named_trainable) as found:
            self.compute_alone(batch)
        return dict(sorted(found.items()))

    def compute_alone(self, batch: Batch) -> None:
        """Forward and backward of a batch, in which no gradient is exchanged. Nothing is changed. Collective."""
        self._exchanges = False
        try:
            with gradients_again.untouched(self.model, self.loss.owner):
                self._forward_backward(batch, batch.samples, False)
                self._finish_exchange()
        finally:
            self._exchanges = True
        for parameter in self.trainable:
            parameter.clear_gradient(False)

    def _blocks_of_layers(self) -> dict[int, int]:
        """The number of the block that a layer is in, by its id, where ranks run different blocks: all of them call
        their layers in the order of these numbers."""
        return {}

    def _forward_backward(
        self, batch: Batch, divisor: float, collect_metrics: bool
    ) -> tuple[list[Sums], Count]:
        """Forward and backward of every micro-batch's total / divisor.

        Returns the sums of each (empty without `collect_metrics`), and the loss's count over all of them.
        """
        seen: list[Sums] = []
        counted: Count = 0
        for place, micro_batch in enumerate(batch.micro_batches, start=1):
            last = place == len(batch.micro_batches) and self._exchanges
            with self._dummy() if micro_batch.is_dummy else nullcontext(), self._no_sync(not last):
                with self._draws.around(batch, micro_batch, self.named_layers):
                    outputs, total, count = self._forward(micro_batch)
                if not micro_batch.is_dummy:
                    with self.mixed.context():  # in the forward's dtypes, or the loss would differ
                        self._samplewise.look(outputs, micro_batch.targets, total)
                    self._keep(batch, micro_batch)
                heartbeat.enter("backward")
                waiting = last and self.dp_world_size > 1
                with (
                    self.mixed.backward_context(),
                    self._waiting_for_exchange() if waiting else nullcontext(),
                    self._exchanging(last),
                ):
                    total.backward(self._weight(total, self._factor(micro_batch, divisor)))
            heartbeat.enter("forward")
            counted = counted if micro_batch.is_dummy else counted + count
            if collect_metrics:
                seen.append(self._sums(outputs, total, micro_batch))
        return seen, counted

    def _keep(self, batch: Batch, micro_batch: MicroBatch) -> None:
        """Keeps the first samples for the trial in `differences`."""
        if self.mesh.dp_size > 1 and self._samplewise.keep(micro_batch):
            self._tried = replace(batch, micro_batches=())

    @property
    def _may_freeze(self) -> bool:
        """Whether a parameter may lose its gradient in the midst of a training: DataParallel waits for all of them."""
        return False

    def _look_for_frozen(self) -> None:
        """Before an update: BatchNorms that were frozen since the last one now use their running statistics, so these
        are made equal on all ranks. Collective in that case, which is the same on every rank."""
        now = frozenset(name for name, layer in self._may_be_local if is_local(layer))
        if self._local - now:
            self.sync_buffers()
        self._local, self._ever_local = now, self._ever_local | now

    def _waiting_for_exchange(self) -> AbstractContextManager[None]:
        """Around the backward in which DataParallel exchanges the gradients."""
        return self.mesh.waiting("the exchange of gradients", computes=True)

    def _all_reduce_gradients(self) -> None:
        """All-reduces gradients after backward; here nothing, but checks that backward left none out."""
        if self.mesh.ranks > 1:
            lacking = [name for name, parameter in self._named_trainable if parameter.grad is None]
            check_gradients(lacking, self.mesh, first=not self._gradients_checked)
            self._gradients_checked = True

    @cached_property
    def _named_trainable(self) -> list[tuple[str, paddle.Tensor]]:
        """Asked for in each update, and looked up once: that takes 0.4 ms in a GPT of 24 blocks."""
        return self.named_parameters(trainable=True)

    def _finish_exchange(self) -> None:
        """After a backward: ends the exchanges that it began; here nothing. Collective."""

    def _step(self) -> None:
        self.optimizer.step()

    def settle(self) -> None:
        """Waits, on the device, until this rank has all values of the last update; `values_may_travel` tells who must
        call it."""

    def _begin(self) -> None:
        """Before an update's forward."""

    def share_updates(self) -> None:
        """After this rank's own parameters were given other values: gives them to the ranks that have copies of them
        and do not update them. Collective."""

    def differences(self) -> list[str]:
        """How the training differs from one process's beyond rounding: a sentence for each cause, with what removes it.

        Collective; the same on every rank; complete after the first update.
        """
        if self.mesh.ranks == 1:
            return []
        were_local = [n for n, layer in self._may_be_local if n in self._ever_local or is_local(layer)]
        local = self._gather_names(were_local)
        sentences = []
        if local and self.mesh.dp_size > 1:
            layers = "1 BatchNorm layer normalizes"
            if len(local) > 1:
                layers = f"{len(local)} BatchNorm layers normalize"
            sentences = [
                f"{layers} over one rank's samples ({local[0]}{', …' if len(local) > 1 else ''}): "
                "strategy.sync_batch_norm=true takes those of all ranks"
            ]
        sentences += self.noticed
        if self.mesh.dp_size > 1:
            trial = self._forward_again, self._close(), None if self.mixed.low else self._backward_again
            sentences += self._samplewise.differences(self.mesh, *trial)
        return [*sentences, *self._synced_buffers.differences(), *self.random_differences()]

    def _gather_names(self, names: list[str]) -> list[str]:
        """The names of all ranks, each once. Collective."""
        return list(dict.fromkeys(name for of_rank in self.mesh.gather(names) for name in of_rank))

    def random_differences(self) -> list[str]:
        """A sentence for each random draw in the model that differs on another number of ranks.

        Known after the first update, the same on every rank; empty before it.
        """
        return self._draws.differences()

    def gradient_norm(self) -> paddle.Tensor:
        """The 2-norm over all gradients of the whole model, 0-d, once they are all-reduced."""
        return gradients.global_norm(self.trainable, "float64" if self.mixed.double else "float32")

    def count_ahead(self, batch: Batch) -> float | None:
        """The count of this global batch, over all ranks and micro-batches; None if it is only known after the forward.
        Collective."""
        if self.loss.counted == "samples":
            return batch.samples
        if self.loss.counted == "answers":
            return None
        return self._global_count(sum(self._counted(one) for one in batch.micro_batches if not one.is_dummy))

    def _counted(self, micro_batch: MicroBatch) -> Count:
        """What the loss counts in the targets: on the host, where they are there, for a device would be waited for."""
        if micro_batch.host_targets is None:
            return self.loss.count(micro_batch.targets)
        with paddle.device.device_guard("cpu"):
            return self.loss.count(micro_batch.host_targets)

    def _global_count(self, counted: Count) -> float:
        """The counts of all ranks that read different samples, added up, on every rank. Collective."""
        count = self.mesh.sum([number(counted) if self.mesh.is_loss_rank else 0.0])[0]
        if not count >= 0:
            raise LossError(
                f"the loss {self.loss.name} returned a count of {count:g} for a global batch: it must be 0 or more."
            )
        return count

    def score(self, micro_batch: MicroBatch) -> Score | None:
        """The loss and scores of these samples, in the model's current mode and without gradients.

        None for a dummy, and on a rank whose stage does not have the outputs. All ranks of a reader call it together;
        those for which `mesh.is_loss_rank` is false get the same sums as the one that counts.
        """
        micro_batch = self.mixed.cast_micro_batch(micro_batch)
        outputs = self.predict(micro_batch.inputs)
        if outputs is None or micro_batch.is_dummy:
            return None
        with paddle.no_grad():
            total, count = self.loss(outputs, micro_batch.targets)
        sums = self.loss.sums(outputs, micro_batch.targets, total)
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

    def optimizer_states_on_device(self) -> AbstractContextManager[Any]:
        """Around code that reads or writes the optimizer's states, which may be offloaded."""
        return nullcontext()

    @property
    def predict_is_collective(self) -> bool:
        """Whether all readers must call every `predict` together, because it gathers weights from other ranks."""
        return False

    def _forward(self, micro_batch: MicroBatch) -> tuple[Any, paddle.Tensor, Count]:
        with self.mixed.context():
            outputs = call(self.parallel_model, micro_batch.inputs, plain_forward(self.model))
            total, count = self.loss(outputs, micro_batch.targets)
        return outputs, total, count

    def _forward_again(
        self, micro_batch: MicroBatch, batch: Batch | None = None
    ) -> tuple[paddle.Tensor, Count]:
        """Forward and loss of samples of `batch`, or of those that were kept, with the same dropout masks as before."""
        with self._draws.scope(self._batch_of(batch), micro_batch), self.mixed.context():
            outputs = call(self.model, micro_batch.inputs, plain_forward(self.model))
            return self.loss(outputs, micro_batch.targets)

    def _batch_of(self, batch: Batch | None) -> Batch:
        """`batch`, or that of the samples that were kept."""
        found = self._tried if batch is None else batch
        assert found is not None
        return found

    def _backward_again(self, total: paddle.Tensor) -> Sketches:
        """Sketches of the gradients of such a forward; the gradients are cleared."""
        with self.mixed.backward_context(), self._no_sync(True), self._exchanging(False):
            total.backward()
        self._finish_exchange()
        of_gradients = sketches(self._named_trainable)
        for parameter in self.trainable:
            parameter.clear_gradient(False)
        return of_gradients

    def _close(self) -> float:
        """The relative difference that is allowed between totals of the same numbers."""
        return 1e-7 if self.mixed.double else 1e-2 if self.mixed.low else 1e-5

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
            if (
                len(self._weights) > 16
            ):  # the cache is for factors that repeat; loss scales and counts may not
                self._weights.clear()
            weight = self._weights[factor] = paddle.full(total.shape, factor, total.dtype)
        return weight

    def _unscale(self, factor: float) -> bool:
        """Multiplies the gradients by `factor` and removes float16's loss scale; False if they overflowed and must not
        be used.

        In low precision the average of the exchange is undone here and not in the backward, where numbers N times as
        large would round differently from one process's, and overflow sooner.
        """
        factor *= self.dp_world_size if self.mixed.low else 1
        if self.mixed.scale is None:
            if factor != 1.0:
                gradients.scale(self.trainable, factor)
            return True
        factor /= self.mixed.scale.scale
        finite = bool(paddle.isfinite(self.gradient_norm()).item())
        if finite:
            gradients.scale(self.trainable, factor)
        usable = self.mixed.scale.accept(finite)
        if self.mixed.scale.hopeless:  # on all ranks alike: they have the same gradients
            raise NotFiniteError(
                f"the gradients of {self.mixed.scale.running} updates in a row are not finite, although the loss scale "
                "is down to 1: these updates were skipped. The model's numbers do not fit into float16: set "
                "train.precision=bfloat16 or float32."
            )
        return usable

    def _sums(self, outputs: Any, total: paddle.Tensor, micro_batch: MicroBatch) -> Sums:
        """This micro-batch's sums by name; zeros for a dummy, and on ranks that do not count."""
        sums = self.loss.sums(outputs, micro_batch.targets, total)
        counts = self.mesh.is_loss_rank and not micro_batch.is_dummy
        return {name: value if counts else 0.0 for name, value in sums.items()}

    def _metrics(self, seen: list[Sums], count: float) -> dict[str, float]:
        """The sums of all ranks divided by `count`, and the gradient norm; one that is not finite is so on all ranks.
        The device is read once. Collective."""
        names = list(seen[0])
        of_micro_batches = [row[name] for name in names for row in seen]
        *values, norm = numbers([*of_micro_batches, self.gradient_norm() if count else 0.0])
        # Under a loss scale an overflow is no fault: the update is skipped.
        faulty = not math.isfinite(norm) and self.mixed.scale is None
        self.faulty_gradients = self._faulty_gradients() if faulty else {}
        local = [sum(values[at : at + len(seen)]) for at in range(0, len(values), len(seen))]
        *sums, not_finite_norms = self.mesh.sum([*local, 0.0 if math.isfinite(norm) else norm])
        means = [value / count if count else math.nan for value in sums]
        norm = norm if not_finite_norms == 0 else not_finite_norms
        return {**dict(zip(names, means, strict=True)), "gradient_norm": norm}

    def _faulty_gradients(self) -> dict[str, str]:
        """This rank's gradients that are not finite, by name, with their contents («3 NaN of 100»)."""
        named = self._named_trainable
        return not_finite((name, p.grad) for name, p in named if p.grad is not None)

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        """Disables the wrapper's exchange while more micro-batches follow; the last backward exchanges everything."""
        return self.parallel_model.no_sync() if more_to_come and self.dp_world_size > 1 else nullcontext()

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch's backward, `last` of an update, and no more: gradients of a backward that runs within
        forward (of an adversary's) are its own affair. Here nothing."""
        return nullcontext()

    @contextmanager
    def _dummy(self) -> Iterator[None]:
        """Around a dummy micro-batch: it takes part in every exchange and does not change running statistics."""
        kept = [(statistic, statistic.clone()) for statistic in self._own_statistics()]
        for norm in self._norms:
            norm.present = False
        try:
            yield
        finally:
            for norm in self._norms:
                norm.present = True
        with paddle.no_grad():
            for statistic, value in kept:
                statistic.set_value(value)
