"""Forward and backward of a batch's micro-batches on a placed model, and forwards without backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import paddle
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch, call
from paddle_dp.core.batch_norm import RunningStatistics
from paddle_dp.core.dropout import EVALUATION, Scope, install, number_blocks
from paddle_dp.core.dropout.uncaught import DrawMonitor, cut_unsaid
from paddle_dp.core.loss import Count, Loss, numbers
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.precision import NOTHING, MixedPrecision, nested
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.learner.learner_checks import LearnerCheck
from paddle_dp.learner.update import WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.model.compiled import plain_forward

if TYPE_CHECKING:
    from paddle_dp.learner.timeline import PipelineRecorder

Dropout = Literal["exact", "own"]
Layers = Sequence[tuple[str, nn.Layer]]
Sums = dict[str, Any]  # of a micro-batch, by name: numbers, or 0-d tensors still on the device


def totals(local_sums: Sequence[Sums], *extra: Any) -> tuple[dict[str, float], list[float]]:
    """The sums over micro-batches, by name, and the numbers in `extra`; reads the device once."""
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
class BatchRunner:
    """Computes batches on a placed model: forward and loss of each micro-batch, and backward into the gradients.

    `parallel_model` runs the forward on this rank: the model itself, or a wrapper (paddle.DataParallel, the engine of a
    pipeline). `dropout`: `exact` draws the masks of one process, `own` draws from each rank's generator.
    `copies`: models in this process that compute chunks of each micro-batch.
    """

    placed: PlacedModel
    parallel_model: nn.Layer
    loss: Loss
    mixed: MixedPrecision
    statistics: RunningStatistics
    weights: WeightSync
    dropout: Dropout = "exact"
    copies: int = 1
    recorder: PipelineRecorder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._factors: dict[float, paddle.Tensor] = {}
        number_blocks(self.placed.names.elements())
        self.draws = Draws(self.dropout == "exact", self.placed.mesh)
        self._signature = plain_forward(self.placed.model)  # it names the inputs

    def run(
        self, batch: Batch, divisor: float, exchange: GradientExchange, collect: bool, final: bool = True
    ) -> tuple[list[Sums], Count]:
        """Runs the forward of every micro-batch, and the backward of its total / divisor, which exchanges gradients.

        Without `final` the last micro-batch ends no update, and no gradient is sent. Returns the sums of each
        micro-batch (empty without `collect`), and the loss's count on this rank. Collective.
        """
        local_sums: list[Sums] = []
        counted: Count = 0
        for number, micro_batch in enumerate(batch.micro_batches, start=1):
            last = final and number == len(batch.micro_batches)
            exchange.begin_micro_batch(last)
            is_dummy = micro_batch.is_dummy
            # A dummy takes part in every exchange, and changes neither statistics nor another sample's loss.
            with nested(self.statistics.unchanged(), self.loss.present(False)) if is_dummy else NOTHING:
                with self.draws.around(batch, micro_batch, self.placed.named_layers):
                    outputs, total, count = self.forward(micro_batch, collect)
                counted = counted if is_dummy else counted + count
                heartbeat.enter("backward")
                with self.mixed.around_backward(exchange.backward(last, counted)):
                    factor = self._factor(micro_batch, divisor, exchange)
                    total.backward(self._gradient_of(total, factor))
                if collect or not last:
                    heartbeat.enter("forward")
                if collect:
                    local_sums.append(self._sums(outputs, total, micro_batch))
        return local_sums, counted

    def forward(self, micro_batch: MicroBatch, reads_loss: bool) -> tuple[Any, paddle.Tensor, Count]:
        """The outputs, the loss's total and its count."""
        with self.mixed.context():
            outputs = call(self.parallel_model, micro_batch.inputs, self._signature)
            loss = self.loss if reads_loss else self.loss.for_backward
            total, count = loss(outputs, micro_batch.targets)
        return outputs, total, count

    def _factor(self, micro_batch: MicroBatch, divisor: float, exchange: GradientExchange) -> float:
        """The factor of this micro-batch's total in the backward: 0 for a dummy, else 1 / divisor, times the loss's
        scale and the ranks that the exchange takes the mean over.

        `Learner._correct_gradients` does the rest, once. In low precision that is the mean over ranks, too: numbers N
        times as large would round differently from one process's, and overflow sooner.
        """
        if micro_batch.is_dummy:
            return 0.0
        scale = self.mixed.scale.scale if self.mixed.scale else 1.0
        return scale * (1 if self.mixed.low else exchange.mean_over) / divisor

    def _gradient_of(self, total: paddle.Tensor, factor: float) -> paddle.Tensor:
        """`factor` as the gradient from which the backward of `total` starts; cheaper than `total * factor`."""
        gradient = self._factors.get(factor)
        if gradient is None or gradient.dtype is not total.dtype:
            # The cache is for factors that repeat; loss scales and counts may not.
            if len(self._factors) > 16:
                self._factors.clear()
            gradient = self._factors[factor] = paddle.full(total.shape, factor, total.dtype)
        return gradient

    def _sums(self, outputs: Any, total: paddle.Tensor, micro_batch: MicroBatch) -> Sums:
        """This micro-batch's sums by name; zeros for a dummy, and on all ranks but the loss rank."""
        sums = self.loss.sums(outputs, micro_batch.targets, total)
        counts = self.placed.mesh.is_loss_rank and not micro_batch.is_dummy
        return {name: value if counts else 0.0 for name, value in sums.items()}

    # Without backward.

    def predict(self, inputs: Any) -> Any:
        """The model's outputs without gradients, in the recipe's precision; under a pipeline on the last stage, None
        elsewhere. Collective over a reader's ranks, and over all readers if `weights.collective_forward`."""
        with self.weights.forward_only(), paddle.no_grad(), self.mixed.context():
            return call(self.placed.model, inputs, self._signature)

    def repeat_forward(self, micro_batch: MicroBatch, batch: Batch) -> tuple[paddle.Tensor, Count]:
        """The loss's total and count of samples of `batch` once more, with the same dropout masks."""
        present = self.loss.present(not micro_batch.is_dummy)
        scope = self.draws.scope(batch, micro_batch)
        with self.weights.forward_only(), scope, self.mixed.context(), present:
            outputs = call(self.placed.model, micro_batch.inputs, self._signature)
            return self.loss(outputs, micro_batch.targets)

    def score(self, micro_batch: MicroBatch) -> Score | None:
        """The loss and scores of these samples, in the model's current mode and without gradients.

        None for a dummy, which takes part in exchanges of the model's and the loss's, and on pipeline stages without
        the outputs. All ranks of a reader call it together and get the same sums; only the one with `mesh.is_loss_rank`
        counts.
        """
        micro_batch = self.mixed.cast_micro_batch(micro_batch)
        outputs = self.predict(micro_batch.inputs)
        with self.weights.forward_only():  # for layers of the model that the loss calls
            return self._score(micro_batch, outputs)

    def _score(self, micro_batch: MicroBatch, outputs: Any) -> Score | None:
        if outputs is None:
            return None
        with paddle.no_grad(), self.loss.present(not micro_batch.is_dummy):
            with self.mixed.context():
                total, count = self.loss(outputs, micro_batch.targets)
            sums = self.loss.sums(outputs, micro_batch.targets, total)
            if self.loss.counted == "targets":  # as in training, whatever the loss returns
                count = self.loss.count(micro_batch.targets)
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


_LayerDraws = tuple[dict[str, list[str]], dict[str, tuple[list[int], int]]]  # `kinds_by_layer` and `doubted`


def _draws_in(watch: DrawMonitor) -> _LayerDraws:
    return {label: sorted(kinds) for label, kinds in watch.kinds_by_layer.items()}, watch.doubted


class Draws(LearnerCheck):
    """The random numbers of a learner's forwards: the masks of one process (`exact`), or separate masks per rank.

    It wraps each forward in a scope of dropout, and names draws that no scope controls: they depend on the number of
    ranks. A monitor watches the first batch's forwards for these, and after `watch_on` all later ones; asynchronous
    ranks may share its findings many updates later.
    """

    def __init__(self, exact: bool, mesh: Mesh):
        self.exact, self._mesh = exact, mesh
        self._watch: DrawMonitor | None = DrawMonitor()
        self._watched: tuple[int, int] | None = None  # epoch and number of that batch
        self._later: DrawMonitor | None = None  # watches the batches after it
        self._evaluation_watch: DrawMonitor | None = None
        self._kinds_by_layer: dict[str, list[str]] = {}
        self._doubted: dict[str, tuple[list[int], int]] = {}
        self._unsaid: dict[str, str] = {}
        if exact:
            install()

    def around(
        self, batch: Batch, micro_batch: MicroBatch, layers: Callable[[], Layers]
    ) -> AbstractContextManager[Any]:
        """Wraps the forward of one micro-batch; `layers` returns this rank's named layers."""
        scope = self.scope(batch, micro_batch)
        watch = self._watch
        if watch is not None:
            self._watched = self._watched or (batch.epoch, batch.index)
        if watch is None or self._watched != (batch.epoch, batch.index):
            watch = self._later
        if watch is None:
            return scope
        return nested(scope, watch.on(layers()))

    def watch_on(self) -> None:
        """Watches later batches as well as the first one, until `gather_later`."""
        self._later = DrawMonitor(notes_calls=False)

    def after_update(self) -> None:
        """Shares the ranks' findings after the first update, or a later one. Collective."""
        if self._watch is None:
            return
        mesh = self._mesh
        if mesh.ranks > 1:
            self._unsaid = cut_unsaid(mesh.gather((dict(mesh.coords), self._watch.dropped)))
        watch, self._watch = self._watch, None
        self._gather(watch)

    def gather_later(self) -> None:
        """Shares the findings since `watch_on`, and ends it. Collective."""
        watch, self._later = self._later, None
        if watch is not None:
            self._gather(watch)

    def _gather(self, watch: DrawMonitor) -> None:
        draws = _draws_in(watch)
        self.add(self._mesh.gather(draws) if self._mesh.ranks > 1 else [draws])

    def add(self, draws_of_ranks: Iterable[_LayerDraws]) -> None:
        """Adds what all ranks have found, in an equal order on each."""
        for kinds_by_layer, doubted in draws_of_ranks:
            self._doubted = doubted | self._doubted
            for label, kinds in kinds_by_layer.items():
                self._kinds_by_layer[label] = sorted({*self._kinds_by_layer.get(label, []), *kinds})

    def differences(self) -> list[str]:
        """Sentences about draws that differ, or may differ, on another number of ranks."""
        return [*self._drawn(), *self._unclear()]

    def _unclear(self) -> Iterator[str]:
        if self._unsaid:
            first, more = min(self._unsaid), len(self._unsaid) - 1
            also = f" ({more} more do, too)" if more else ""
            yield (
                f"{first} drops by the same mask on all ranks of the {self._unsaid[first]} axis, which hold different "
                f"slices there{also}. Name a dropout between cut layers as `colwise` in `cuts`, and the method that "
                "drops attention weights in `attention_methods`"
            )
        if not self._doubted:
            return
        first, more = min(self._doubted), len(self._doubted) - 1
        also = f" ({more} more do, too)" if more else ""
        shape, samples = self._doubted[first]
        yield (
            f"{first} drops elements of a tensor {shape} in a micro-batch of {samples} samples{also}: dim 0 does not "
            "tell to which sample a row belongs, so another number of ranks may drop others; "
            f"drop where it is [{samples}, …]"
        )

    def _drawn(self) -> list[str]:
        if not self._kinds_by_layer:
            return []
        first, more = min(self._kinds_by_layer), len(self._kinds_by_layer) - 1
        noun = f"{first} and {more} more draw" if more else f"{first} draws"
        kinds = {kind for kinds in self._kinds_by_layer.values() for kind in kinds}
        if not self.exact and "Paddle" in kinds:
            return [
                f"{noun} other random numbers on each rank; train.dropout=exact makes those of dropout the same on any "
                "number of ranks"
            ]
        owners = " and ".join(f"{kind}'s" for kind in sorted(kinds))
        return [
            f"{noun} from {owners} generator, which differs on another number of ranks: exact are dropout, and one "
            "number for each sample"
        ]

    def scope(self, batch: Batch, micro_batch: MicroBatch) -> AbstractContextManager[Any]:
        """Wraps any forward of these samples of a batch: it draws their masks from the first call on."""
        if not self.exact:
            return NOTHING
        samples = max(micro_batch.samples, 1)
        return Scope(batch.seed, batch.epoch, batch.index, micro_batch.first, samples, micro_batch.places)

    # In an evaluation, for models that draw there, too (Monte-Carlo dropout).

    def around_evaluation(
        self, batch: Batch, micro_batch: MicroBatch, batch_size: int, layers: Callable[[], Layers]
    ) -> AbstractContextManager[Any]:
        """Wraps an evaluation's forward and loss of one micro-batch, of batches of `batch_size` samples.

        A mask depends on the sample's position among all held-out samples: each evaluation draws it again, on any
        number of ranks. The first evaluation's first forward is watched, as the first update is.
        """
        scope: AbstractContextManager[Any] = NOTHING
        if self.exact:
            first = batch.index * batch_size + micro_batch.first
            scope = Scope(batch.seed, EVALUATION, 0, first, max(micro_batch.samples, 1))
        if self._evaluation_watch is not None or self._mesh.ranks == 1:
            return scope
        self._evaluation_watch = DrawMonitor(notes_calls=False)
        return nested(scope, self._evaluation_watch.on(layers()))

    def evaluation_draws(self) -> _LayerDraws:
        """What this rank's watch of the first evaluation has found, to be gathered for `add`."""
        return _draws_in(self._evaluation_watch) if self._evaluation_watch is not None else ({}, {})
