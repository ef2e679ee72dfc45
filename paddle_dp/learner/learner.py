"""A learner: makes one update of a placed model from each global batch. Strategies differ in its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import paddle
from paddle import nn

from paddle_dp.batch import Batch
from paddle_dp.core import gradients
from paddle_dp.core.batch_norm import LocalNorms, RunningStatistics
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.consistency import CHANGED, DRAWN, check_gradients, check_sound
from paddle_dp.core.extra_forwards import buffers_before
from paddle_dp.core.first_not_finite import not_finite
from paddle_dp.core.loss import Count, Loss
from paddle_dp.core.optimizer import Rate, parameters_of
from paddle_dp.core.placed_model import Placed, PlacedModel
from paddle_dp.core.precision import LossScale, MixedPrecision
from paddle_dp.core.turns import TurnsLoss, joined
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.exchange.gradient_exchange import ExtraState, GradientExchange, SavedExtraState
from paddle_dp.learner.learner_checks import LearnerCheck, UnsavedState, overriding
from paddle_dp.learner.runner import BatchRunner, Sums, totals
from paddle_dp.learner.update import Counter, States, WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.heartbeat import heartbeat

_NEVER_USED = (
    "parameter '{}' got no gradient on any rank, and paddle.DataParallel exchanges none of a bucket's gradients before "
    "it has all. Set strategy.find_unused_parameters=true, or freeze the parameter (stop_gradient)."
)
Approve = Callable[[Mapping[str, float]], bool]
"""Whether an update is to be made, by its metrics; the same answer on every rank."""


class AsyncRank(Protocol):
    """A rank that does not wait for the others: the trainer then trains in rounds (train/rounds.py).

    `computes`: this rank computes shares, and does not only serve the others.
    """

    computes: bool

    def begin_round(self) -> None:
        """Begins a round. Collective."""

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        """Learns from this rank's share of a global batch.

        With `collect`, returns the share's sums by name (`loss` and scores), the number that the loss counts in it
        (`count`), and the `gradient_norm` of its mean.
        """

    def end_of_work(self) -> None:
        """Called when no share is left for this rank in a round."""

    def serve(self) -> Iterator[int]:
        """On a rank that computes no shares: serves the others until they have ended their work. Yields the number of
        each global batch that they reach."""

    def end_round(self) -> None:
        """Ends a round: from here on all ranks have the weights of the training. Collective."""


@dataclass(kw_only=True)
class Learner:
    """Makes one update from each global batch; this process has its share of it.

    The gradient of an update is the one-process gradient. With any number of micro-batches and ranks, each backward
    runs on total / (global count), and gradients are summed over micro-batches and ranks; so unequal shares are as
    exact as equal ones. Where the count is only known from the loss's call, each backward runs on total / (global
    samples), and the all-reduced gradients are multiplied by samples / count. If nothing in a batch counts, no update
    is made, and `empty` is true until the next one.

    `known_differences`: sentences on differences from one process that are known before the first update; `unknown`: on
    trials that failed. `async_rank`: set if ranks do not wait for one another. `exchange`: of the latest update.
    `unscaled_by`: the factor by which the gradients of the last update were multiplied after their exchange.
    `faulty_gradients`: this rank's gradients that were not finite in the last update with metrics, and their contents.
    `local_loss`: this rank's share of that update's loss, a sum.
    """

    placed: PlacedModel
    loss: Loss
    optimizer: paddle.optimizer.Optimizer
    rate: Rate
    mixed: MixedPrecision
    runner: BatchRunner
    weights: WeightSync
    statistics: RunningStatistics
    buffers: Buffers
    local_norms: LocalNorms
    checks: Sequence[LearnerCheck] = ()
    async_rank: AsyncRank | None = None
    known_differences: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    empty: bool = field(default=False, init=False)
    unscaled_by: float = field(default=1.0, init=False)
    faulty_gradients: dict[str, str] = field(default_factory=dict, init=False)
    local_loss: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.model: nn.Layer = self.placed.model
        self.mesh: Mesh = self.placed.mesh
        self.trainable = self.placed.trainable
        self.mode = self.weights.mode
        self.weights.after_equal = self.after_update
        self.unsaved = UnsavedState(self.placed, self.optimizer, self.loss, self.rate.schedule)
        self._before_update = overriding(self.checks, "before_update")
        self._after_exchange = overriding(self.checks, "after_exchange")
        self._after_update = overriding(self.checks, "after_update")
        updated = {id(p) for p in parameters_of(self.optimizer)}
        # A stage, or a server of frozen weights, may have no parameters, but Paddle's methods access the first one.
        self._updates_parameters = bool(updated)
        self._not_updated = [p for p in self.trainable if id(p) not in updated]  # here: another rank may
        self._turn = ""  # the running one, if the model is trained in turns
        # Parameters without a gradient on any rank in the first update, by turn; a missing turn had none yet.
        self._unused: dict[str, frozenset[str]] = {}
        self._metric_names: list[str] = []

    @property
    def exchange(self) -> GradientExchange:
        return self.mode.exchange

    def train_batch(
        self, batch: Batch, collect_metrics: bool = False, approve: Approve | None = None
    ) -> dict[str, float] | None:
        """Makes one update from one global batch. Collective.

        With `collect_metrics`, returns `loss` and the loss's scores, means over the global batch, and `gradient_norm`,
        the 2-norm of the whole model's gradients before clipping; the same numbers on every rank. They cost one read
        from the device, without which the host does not wait for it, and one small exchange. If nothing in the batch
        counts, means are NaN and `gradient_norm` is 0.
        `approve` is called with these metrics before the update, unless nothing counts. If it returns False, weights,
        optimizer states, running statistics and buffers are unchanged; the schedule advances.

        Raises LossError when the loss does not return its count, DivergenceError when a gradient is not exchanged,
        NotFiniteError when float16 cannot hold the gradients at any loss scale.
        """
        heartbeat.enter("forward")
        self.mode = mode = self.weights.begin_update(self.rate.steps + 1)
        undo = buffers_before(self.model, self.loss.owner) if approve else None
        batch, collect = self.mixed.cast_batch(batch), collect_metrics or approve is not None
        for check in self._before_update:
            check(mode)
        if isinstance(self.loss, TurnsLoss):
            metrics = self._take_turns(self.loss, batch, collect)
        else:
            metrics = self._train(batch, collect, approve, undo)
        self.rate.step()
        self.after_update()
        return metrics

    def _take_turns(self, loss: TurnsLoss, batch: Batch, collect: bool) -> dict[str, float] | None:
        """One update of the parameters of each turn that is due, one after the other. Collective."""
        due = [turn for turn in loss.turns if turn.every.due_at_step(self.rate.steps + 1)]
        metrics: dict[str, dict[str, float]] = {}
        faulty: dict[str, str] = {}
        empty, local_loss = [], 0.0
        for turn in due:
            self._turn = turn.name
            self.weights.wait()  # for the weights of the turn before, which layers read without their forward, too
            with loss.during(turn, self.placed.named_trainable):
                metrics[turn.name] = self._train(turn.batch(batch), collect) or {}
            empty.append(self.empty)
            local_loss += self.local_loss
            faulty = faulty or self.faulty_gradients  # of the first turn: later ones compute with its weights
        self.empty, self.local_loss, self.faulty_gradients = all(empty), local_loss, faulty
        return joined(metrics) if collect else None

    def _train(
        self,
        batch: Batch,
        collect: bool,
        approve: Approve | None = None,
        undo: Callable[[], None] | None = None,
    ) -> dict[str, float] | None:
        """One update of the parameters that get gradients: of all, or of a turn's. `undo` restores the buffers that the
        forward has changed. Collective."""
        update, mode = self.rate.steps + 1, self.mode
        local_sums, divisor, count = self.compute_gradients(batch, mode.counter, mode.exchange, collect)
        self.empty = count == 0
        for check in self._after_exchange:
            check(update, self.empty)
        usable = not self.empty and self._correct_gradients(divisor, count)
        metrics = self._metrics(local_sums, count) if collect else None
        heartbeat.enter("update")
        if approve and undo and metrics is not None and not self.empty and not approve(metrics):
            undo()
        elif usable:
            self.update()
        self._clear_gradients()
        return metrics

    def compute_gradients(
        self, batch: Batch, counter: Counter, exchange: GradientExchange, collect: bool
    ) -> tuple[list[Sums], float, float]:
        """Forward and backward of a batch, and the exchange. Returns the sums of each micro-batch, the divisor of the
        backwards, and the count by which they were to be divided: gradients × divisor / count are the gradients of the
        mean. Collective."""
        known = counter.known_count(batch)
        divisor = batch.samples if known is None else known or 1.0
        scale = 1.0 if self.mixed.scale is None else self.mixed.scale.scale
        exchange.begin_update(self.rate.steps + 1, scale, divisor)
        local_sums, counted = self.run(batch, divisor, exchange, collect)
        heartbeat.enter("exchange")
        missing = exchange.finish()
        first = self._turn not in self._unused
        if exchange.missing == "raise" and (missing or first) and self.mesh.ranks > 1:
            self._refuse_missing(missing)
        return local_sums, divisor, counter.final_count(counted) if known is None else known

    def run(
        self, batch: Batch, divisor: float, exchange: GradientExchange, collect: bool, final: bool = True
    ) -> tuple[list[Sums], Count]:
        """Forward and backward of a batch (`BatchRunner.run`), whose errors name their cause. Collective."""
        try:
            return self.runner.run(batch, divisor, exchange, collect, final)
        except RuntimeError as error:
            explained = exchange.explain(error) or self.weights.explain(error)
            if explained is None:
                raise
            raise explained from error

    def update(self) -> None:
        """Clips the final gradients, lets the optimizer step, and publishes the weights. Collective."""
        mode = self.mode
        self.weights.wait()  # for weights that no layer of this forward has read
        mode.norm.clip()
        if mode.counter.steps and self._updates_parameters:
            self.weights.step(self.optimizer)
        self.weights.publish()
        mode.exchange.commit()

    def skip_update(self) -> None:
        """Counts an update without making it: only the schedule advances. Collective."""
        self.empty = False
        self.rate.step()
        self.buffers.sync()

    def after_update(self) -> None:
        """Calls the checks after an update, unless the ranks' weights differ. Collective."""
        if not self.weights.diverged:
            for check in self._after_update:
                check()

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context for a training's updates, within which new weights may still arrive (`WeightSync.overlaps`)."""
        self._clear_gradients()  # of an update that failed, or of a backward that the user has run
        self.weights.overlaps = True
        try:
            yield
        finally:
            self.weights.overlaps = False
            self.weights.wait()

    def drop_gradients(self) -> None:
        """Drops gradients of a backward that a callback has run: the next update, on each rank, would add them."""
        if any(parameter.grad is not None for parameter in self.trainable):
            self._clear_gradients()

    def check(self, when: str, states: States = (), cause: str = CHANGED) -> None:
        """Raises NotFiniteError unless all tensors of the model are finite, DivergenceError unless replicas of a
        parameter are bit-equal. `states` are optimizer states to check, too; `cause`: a likely cause of different ones,
        and its remedy. Collective."""
        replicas, tensors = self.weights.compared(self.placed, states)
        check_sound(replicas, tensors, self.mesh, when, self.placed.infinite_from_start, cause)

    def check_placed(self) -> None:
        """Checks weights that the ranks have drawn, and not exchanged. Collective."""
        self.check("after the weights were placed", cause=DRAWN)

    def synchronized_statistics(self) -> list[Placed]:
        """The running statistics of BatchNorms over the samples of all ranks: the same on each that has the same
        channels. A server takes the first worker's."""
        ids = {id(tensor) for tensor in self.statistics.synchronized_tensors()} if self.mesh.all_read else ()
        named = [(name, t) for name, t in self.placed.state_without_parameters() if id(t) in ids]
        return [(name, tensor, self.placed.placements.placement_of(tensor)) for name, tensor in named]

    def facts(self) -> list[str]:
        """Parts of a sentence on how this training is made, compared with one process's. Collective; the same on every
        rank."""
        norms = self.mesh.gather([bool(self.statistics.synchronized), bool(self.local_norms.names())])
        facts = (
            ["shares of the same global batches"] if self.async_rank is not None else ["same global batches"]
        )
        if any(is_local for _, is_local in norms) and self.mesh.dp_size > 1:
            facts.append("BatchNorm over each rank's own samples")
        elif any(synchronized for synchronized, _ in norms):
            facts.append("BatchNorm over the samples of all ranks")
        exact = self.runner.dropout == "exact"
        masks = "exact dropout masks" if exact else "each rank's own dropout masks"
        return [*facts, masks, self.weights.description or self.exchange.description]

    def micro_batches_line(self, micro_batches: int) -> str:
        """A line on BatchNorm where a batch is computed in parts, which changes the training; "" otherwise.
        Collective; the same on every rank."""
        here = bool(self.statistics.synchronized or self.local_norms.watched)
        if micro_batches == 1 or not any(self.mesh.gather(here)):
            return ""
        return (
            f"BatchNorm takes the statistics of each of the {micro_batches} micro-batches: with another "
            "train.micro_batches another model is learned."
        )

    def differences(self) -> list[str]:
        """Differences from one process's training beyond rounding: a sentence for each cause, with its remedy.

        Collective; the same on every rank. Some are known only after updates.
        """
        if self.mesh.ranks * self.runner.copies == 1:
            return []
        sentences: Iterable[str] = (sentence for check in self.checks for sentence in check.differences())
        return list(dict.fromkeys(sentences))  # draws may be known from a trial, too

    def extra_state(self) -> ExtraState:
        """The tensors that a checkpoint holds in addition to model and optimizer. Call it outside of
        `weights.means`."""
        states = (self.weights.extra_state(), self.weights.mode.exchange.extra_state())
        return ExtraState(
            shared={name: tensor for state in states for name, tensor in state.shared.items()},
            local={name: tensor for state in states for name, tensor in state.local.items()},
        )

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """Loads them after model and optimizer; `saved` is empty if another strategy wrote the checkpoint."""
        self.weights.load_extra_state(saved)
        self.weights.mode.exchange.load_extra_state(saved)

    def _refuse_missing(self, missing: Sequence[int]) -> None:
        """Raises DivergenceError for a gradient that only some ranks lack, or that the exchange waits for."""
        lacking = {id(self.trainable[index]) for index in missing}
        names = [name for name, parameter in self.placed.named_trainable if id(parameter) in lacking]
        unused = self._unused[self._turn] = check_gradients(names, self.mesh, self._unused.get(self._turn))
        if unused and self.exchange.waits_for_all:
            raise DivergenceError(_NEVER_USED.format(min(unused)))

    def _correct_gradients(self, divisor: float, count: float) -> bool:
        """Multiplies the exchanged gradients once, by all factors that make them one process's. False if they
        overflowed float16 and must not be used. Collective."""
        # `BatchRunner._factor` divides by `divisor`, before the count of a loss that returns it is known.
        factor = divisor / count
        factor *= self.exchange.mean_over if self.mixed.low else 1  # as `BatchRunner._factor` has left to do
        scale = self.mixed.scale
        self.unscaled_by = factor = factor / (1.0 if scale is None else scale.scale)
        usable = scale is None or self._update_loss_scale(scale)
        if usable and factor != 1.0:
            gradients.scale(self.trainable, factor)
        return usable

    def _update_loss_scale(self, scale: LossScale) -> bool:
        """Changes the loss scale by whether the gradients are finite, and returns whether they are. Collective."""
        finite = scale.update(math.isfinite(float(self.mode.norm.global_norm())))
        if scale.hopeless:  # on all ranks alike: they have the same norm
            raise NotFiniteError(
                f"the gradients of {scale.running} updates in a row are not finite, although the loss scale is down to "
                "1: these updates were skipped. The model's numbers do not fit into float16: set "
                "train.precision=bfloat16 or float32."
            )
        return finite

    def _metrics(self, local_sums: list[Sums], count: float) -> dict[str, float]:
        """The sums of all ranks divided by the global count, and the gradient norm, which is finite on all ranks or on
        none. Reads the device once. Collective."""
        self.exchange.before_metrics(self.rate.steps + 1)
        count, norm = self.mode.counter.global_count(count), self.mode.norm
        self.empty = count == 0
        local, (term,) = totals(local_sums, norm.term() if count else 0.0)
        self.local_loss = local.get("loss", 0.0)
        names = self._names_of_metrics(list(local))
        *sums, row = self.mesh.sum([*(local.get(name, 0.0) for name in names), norm.to_row(term)])
        gradient_norm = norm.from_row(term, row)
        # Under a loss scale an overflow is no fault: the update is skipped.
        self.faulty_gradients = {}
        if not math.isfinite(gradient_norm) and self.mixed.scale is None:
            named = self.placed.named_trainable
            self.faulty_gradients = not_finite((name, p.grad) for name, p in named if p.grad is not None)
        means = [value / count if count else math.nan for value in sums]
        return {**dict(zip(names, means, strict=True)), "gradient_norm": gradient_norm}

    def _names_of_metrics(self, local: list[str]) -> list[str]:
        """The names on all ranks; stages and servers without a loss take them from the others. Collective."""
        if self.mesh.all_read and self.mesh.axes.pipeline == 1:
            return local
        if not (self.mesh.all_read and self._metric_names):
            self._metric_names = max(self.mesh.gather(local), key=len)
        return self._metric_names

    def _clear_gradients(self) -> None:
        if self._updates_parameters:
            self.optimizer.clear_grad(set_to_zero=False)
        for parameter in self._not_updated:
            parameter.clear_gradient(False)
