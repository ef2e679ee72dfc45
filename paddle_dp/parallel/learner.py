"""A learner: a placed model, its optimizer and its schedule; makes one update from one global batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import paddle

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.errors import DivergenceError, LossError, NotFiniteError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.traffic import traffic
from paddle_dp.parallel import gradients
from paddle_dp.parallel.attributes import Attributes, OptimizerMemory
from paddle_dp.parallel.batch_norm import LocalNorms
from paddle_dp.parallel.buffers import Buffers
from paddle_dp.parallel.consistency import check_gradients
from paddle_dp.parallel.exchange.memory import nbytes
from paddle_dp.parallel.exchange.reducer_buckets import ReducerBuckets
from paddle_dp.parallel.extra_state import ExtraState, SavedExtraState
from paddle_dp.parallel.first_not_finite import not_finite
from paddle_dp.parallel.learning_rate import Rate
from paddle_dp.parallel.loss import Count, number
from paddle_dp.parallel.missing_gradients import MissingGradients
from paddle_dp.parallel.optimizer_checks import parameters_of
from paddle_dp.parallel.passes import MicroBatchRunner, Sums, totals
from paddle_dp.parallel.placed_model import Trainable
from paddle_dp.parallel.trial import buffers_before

if TYPE_CHECKING:
    from paddle_dp.parallel.pipeline.timeline import PipelineRecorder

NO_REMEDY = (
    "under this strategy ranks do not meet in a forward, as those of data_parallel with sync_batch_norm do"
)
_LOCAL_PAIRS = (
    "the loss {} compares the samples of each rank with one another only (loss.across: rank): loss.across=ranks "
    "compares all of the micro-batch"
)
_UNUSED = (
    "a parameter that was used before is not used in this forward, on this rank at least, and paddle.DataParallel "
    "waits for its gradient. Set strategy.find_unused_parameters=true, or use every parameter in every forward."
)
_NEVER_USED = (
    "parameter '{}' got no gradient on any rank, and paddle.DataParallel exchanges none of a bucket's gradients before "
    "it has all. Set strategy.find_unused_parameters=true, or freeze the parameter (stop_gradient)."
)
Accept = Callable[[Mapping[str, float]], bool]
"""Whether an update is to be made, by its metrics; the same answer on every rank."""


@dataclass(kw_only=True)
class Learner(MicroBatchRunner):
    """A placed model and its optimizer, which make one update from each global batch; this process has its share of it.

    The gradient of an update is the one-process gradient. With any number of micro-batches and ranks, each backward
    runs on total / (global count), and gradients are summed over micro-batches and ranks; so unequal shares are as
    exact as equal ones. Where the count is only known from the loss's call, each backward runs on total / (global
    samples), and the all-reduced gradients are multiplied by samples / count. If nothing in a batch counts, no update
    is made, and `empty` is true until the next one.

    `known_differences`: sentences on differences from one process that were known before; `unknown`: on what could not
    be tried.
    `values_may_travel`: after an update other ranks' new parameters may still be on their way, for the next forward
    waits for them layer by layer; who sets it calls `wait_for_params` before anybody else reads a parameter.
    `unscaled_by`: what the gradients of the last update were multiplied by after their exchange.
    `faulty_gradients`: this rank's gradients that were not finite in the last update with metrics, and their contents.
    `local_loss`: its share of that update's loss, a sum.
    """

    optimizer: paddle.optimizer.Optimizer
    schedule: paddle.optimizer.lr.LRScheduler | None
    faulty_gradients: dict[str, str] = field(default_factory=dict, init=False)
    local_loss: float = field(default=0.0, init=False)
    recorder: PipelineRecorder | None = field(
        default=None, init=False
    )  # under a pipeline: times of its stages
    empty: bool = field(default=False, init=False)
    values_may_travel: bool = field(default=False, init=False)
    known_differences: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unscaled_by: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._placed_trainable = Trainable(self.named_parameters())
        updated = {id(p) for p in parameters_of(self.optimizer)}
        # A stage may have no parameters, and Paddle's methods ask for the first.
        self._updates_parameters = bool(updated)
        self._not_updated = [p for p in self.trainable if id(p) not in updated]  # here: another rank may
        # Parameters that no rank had a gradient of in the first update, where ranks are compared.
        self._unused: frozenset[str] | None = None
        self._warned_unused = False
        self._reducer: ReducerBuckets | None = None
        self._absent = MissingGradients(self.mesh)
        self.rate = Rate(self.optimizer, self.schedule)
        self._synced_buffers = Buffers(self.named_buffers, self.mesh, self._same_buffers())
        self._local_norms = LocalNorms(self.named_layers())
        self._optimizer_memory = OptimizerMemory(self.optimizer)
        layers = {f"model.{name}".rstrip("."): layer for name, layer in self.named_layers()}
        owner = self.loss.owner
        loss = {} if owner is None or any(owner is layer for layer in layers.values()) else {"loss": owner}
        self._attributes = Attributes({**layers, **loss, "schedule": self.schedule})

    def lost_of_optimizer(self) -> list[str]:
        """The attributes of a user's optimizer that training has changed and checkpoints do not save. Collective."""
        return self._gather_names(self._optimizer_memory.lost())

    def unsaved_attributes(self) -> list[str]:
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
        if self._local_norms.look():
            self.sync_buffers()  # one that was frozen now uses its running statistics
        known = self.known_count(batch)
        divisor = batch.samples if known is None else known or 1.0
        local_sums, answered = self._forward_backward(batch, divisor, collect_metrics or accept is not None)
        heartbeat.enter("exchange")
        self._all_reduce_gradients()
        count = self._global_count(answered) if known is None else known
        self.empty = count == 0
        if not (self._warned_unused or self.empty):
            self._tell_unused()
        usable = not self.empty and self._unscale(divisor / count)
        metrics = self._metrics(local_sums, count) if collect_metrics or accept else None
        heartbeat.enter("update")
        if accept and undo and metrics is not None and not self.empty and not accept(metrics):
            undo()
        elif usable:
            self._step()
        if self._updates_parameters:
            self.optimizer.clear_grad(set_to_zero=False)
        for parameter in self._not_updated:
            parameter.clear_gradient(False)
        self.rate.step()
        self._after_update()
        return metrics

    def _forward_backward(
        self, batch: Batch, divisor: float, collect_metrics: bool
    ) -> tuple[list[Sums], Count]:
        try:
            return super()._forward_backward(batch, divisor, collect_metrics)
        except RuntimeError as error:
            if self.dp_world_size == 1 or "find_unused_parameters" not in str(error):
                raise
            raise DivergenceError(_UNUSED) from error

    def _tell_unused(self) -> None:
        """Says once, on the first rank, which trained parameters no rank has a gradient of. Collective."""
        self._warned_unused = True
        present = {name: parameter.grad is not None for name, parameter in self._named_trainable}
        lacking = self._gather_names([name for name, there in present.items() if not there])
        there = set(self._gather_names([name for name in lacking if present.get(name)])) if lacking else set()
        unused = [name for name in lacking if name not in there]
        if unused and self.mesh.is_main:
            more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            print(
                f"parameter '{unused[0]}'{more} got no gradient in update {self.rate.steps + 1}: neither the outputs "
                "nor the loss use it, so updates leave it as it is. This is said once.",
                file=sys.stderr,
                flush=True,
            )

    def _after_update(self) -> None:
        """What ranks tell each other after an update. Collective."""
        self._draws.gather_findings(self.mesh)
        self._synced_buffers.sync()

    def skip_update(self) -> None:
        """Counts an update without making it: the schedule goes on, and nothing else changes. Collective."""
        self.empty = False
        self.rate.step()
        self._synced_buffers.sync()

    @property
    def _may_freeze(self) -> bool:
        """Whether a parameter may lose its gradient in the midst of a training: DataParallel waits for all of them."""
        return False

    def _all_reduce_gradients(self) -> None:
        """All-reduces gradients after backward; here nothing, but checks that backward left none out."""
        if self.mesh.ranks > 1:
            if self.dp_world_size > 1:
                size = sum(nbytes(parameter) for _, parameter in self._named_trainable)
                traffic.all_reduced(size, self.dp_world_size)
            lacking = [name for name, parameter in self._named_trainable if parameter.grad is None]
            self._unused = check_gradients(lacking, self.mesh, self._unused)
            if self._unused:
                raise DivergenceError(_NEVER_USED.format(min(self._unused)))

    def _step(self) -> None:
        self.optimizer.step()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the updates of a training: within it values may travel (`values_may_travel`)."""
        self.values_may_travel = True
        try:
            yield
        finally:
            self.values_may_travel = False
            self.wait_for_params()

    def wait_for_params(self) -> None:
        """Waits, on the device, until this rank has all values of the last update; `values_may_travel` tells who must
        call it."""

    def _begin(self) -> None:
        """Before an update's forward."""

    def film_exchange(self) -> None:
        """From now on the buckets of paddle.DataParallel are on the heartbeat's tape, as those of our own exchanges are
        anyway."""
        wrapper = self.parallel_model
        if self.dp_world_size > 1 and isinstance(wrapper, paddle.DataParallel):
            self._reducer = self._reducer or ReducerBuckets(wrapper)
            self._reducer.begin()

    # Ranks that have weights of their own for a while override the following.

    def averaged(self, states: bool = False) -> AbstractContextManager[None]:
        """Around code that reads the weights of the training, and with `states` the optimizer's: where each rank has
        its own, their means stand in their places within it. Collective."""
        return nullcontext()

    def finalize(self) -> None:
        """At the end of a training: from here on all ranks have the same weights. Collective."""

    def global_gradients(self) -> AbstractContextManager[None]:
        """Around code that reads the gradients of an update before it is made: within it they are those of the global
        batch, also where ranks use those of their own shares. Collective."""
        return nullcontext()

    @property
    def counts_bytes(self) -> bool:
        """Whether all that a step sends is counted (`mesh.traffic`)."""
        return True

    def extra_state(self) -> ExtraState:
        """What a checkpoint has to hold beside model and optimizer. Call it outside of `averaged`."""
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """From a checkpoint, after model and optimizer; of another strategy's it is empty."""

    # Ranks that do not wait for each other override these: the loop then trains in rounds (train/rounds.py).

    @property
    def asynchronous(self) -> bool:
        return False

    @property
    def computes(self) -> bool:
        """Whether this rank computes shares, in rounds; not one that serves the others alone."""
        return True

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        """One update from this rank's share of a global batch. Not collective.

        With `collect`, returns the share's sums by name, `loss` and scores, what the loss counts in it (`count`), and
        the `gradient_norm` of its mean.
        """
        raise NotImplementedError

    def end_of_work(self) -> None:
        """When this rank has computed all shares that it could get in a round. Not collective."""

    def serve(self) -> Iterator[int]:
        """On a rank that computes no shares: works for the others until they all have left off. Yields the number of a
        global batch when others have come to it."""
        raise NotImplementedError

    def end_round(self) -> None:
        """At a round's end: from here on all ranks have the weights of the training. Collective."""

    def begin_round(self) -> None:
        """At a round's beginning. Collective."""

    def share_updates(self) -> None:
        """After this rank's own parameters were given other values: gives them to the ranks that have copies of them
        and do not update them. Collective."""

    def facts(self) -> list[str]:
        """What this training has in common with one process's, or has not, by how it is made: parts of a sentence.

        Collective; the same on every rank.
        """
        norms = self.mesh.gather([bool(self._norms), bool(self._local_norms.names())])
        facts = ["shares of the same global batches"] if self.asynchronous else ["same global batches"]
        if any(local for _, local in norms) and self.mesh.dp_size > 1:
            facts.append("BatchNorm over each rank's own samples")
        elif any(synchronized for synchronized, _ in norms):
            facts.append("BatchNorm over the samples of all ranks")
        masks = "exact dropout masks" if self.dropout == "exact" else "each rank's own dropout masks"
        return [*facts, masks, self._exchanged]

    @property
    def _exchanged(self) -> str:
        """How gradients come together, as a part of a sentence."""
        return f"gradients rounded to {self.rounds_to}" if self.rounds_to else "unrounded gradients"

    def differences(self) -> list[str]:
        """How the training differs from one process's beyond rounding: a sentence for each cause, with what removes it.

        Collective; the same on every rank; what only updates show is there after them.
        """
        if self.mesh.ranks == 1:
            return []
        local = self._gather_names(self._local_norms.names())
        sentences = []
        if local and self.mesh.dp_size > 1:
            layers = "1 BatchNorm layer normalizes"
            if len(local) > 1:
                layers = f"{len(local)} BatchNorm layers normalize"
            sentences = [
                f"{layers} over one rank's samples ({local[0]}{', …' if len(local) > 1 else ''}): {self._remedy}"
            ]
        sentences += self.known_differences
        if self.mesh.dp_size > 1 and self.loss.compares == "rank":
            sentences.append(_LOCAL_PAIRS.format(self.loss.name))
        sentences += [*self._synced_buffers.differences(), *self.random_differences()]
        return list(dict.fromkeys(sentences))  # draws may be known from a trial, too

    @property
    def _remedy(self) -> str:
        """What lets BatchNorms see the samples of all ranks."""
        return "strategy.sync_batch_norm=true takes those of all ranks"

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

    def known_count(self, batch: Batch) -> float | None:
        """The count of this global batch, over all ranks and micro-batches; None if it is only known after the forward.
        Collective."""
        if self.loss.counted == "samples":
            return batch.samples
        own = self._local_count(batch)
        return None if own is None else self._global_count(own)

    def _local_count(self, batch: Batch) -> Count | None:
        """The count of this rank's share of a batch; None if it is only known after the forward."""
        own = [one for one in batch.micro_batches if not one.is_dummy]
        if self.loss.counted == "answers":
            return None
        return sum(one.samples if self.loss.counted == "samples" else self._counted(one) for one in own)

    def _counted(self, micro_batch: MicroBatch) -> Count:
        """What the loss counts in the targets: on the host, where they are there, for a device would be waited for."""
        if micro_batch.host_targets is None:
            return self.loss.count(micro_batch.targets)
        with paddle.device.device_guard("cpu"):
            return self.loss.count(micro_batch.host_targets)

    def _global_count(self, counted: Count) -> float:
        """The counts of all ranks that read different samples, added up, on every rank. Collective."""
        return self._checked(self.mesh.sum([number(counted) if self.mesh.is_loss_rank else 0.0])[0])

    def _checked(self, count: float) -> float:
        """A count. Raises LossError for one that is none."""
        if not count >= 0:
            raise LossError(f"the loss {self.loss.name} returned a count of {count:g}: it must be 0 or more.")
        return count

    def optimizer_states_on_device(self) -> AbstractContextManager[Any]:
        """Around code that reads or writes the optimizer's states, which may be offloaded."""
        return nullcontext()

    def _close(self) -> float:
        """The relative difference that is allowed between totals of the same numbers."""
        return 1e-7 if self.mixed.double else 1e-2 if self.mixed.low else 1e-5

    @property
    def rounds_to(self) -> str | None:
        """The dtype to which gradients are rounded in their exchange, for good: each step is one process's from the
        same weights then, within that rounding, and a whole training is not. None: they are not rounded."""
        return None

    def _unscale(self, factor: float) -> bool:
        """Multiplies the gradients by `factor` and removes float16's loss scale; False if they overflowed and must not
        be used.

        In low precision the average of the exchange is undone here and not in the backward, where numbers N times as
        large would round differently from one process's, and overflow sooner.
        """
        factor *= self.dp_world_size if self.mixed.low else 1
        self.unscaled_by = factor / (1.0 if self.mixed.scale is None else self.mixed.scale.scale)
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

    def _metrics(self, local_sums: list[Sums], count: float) -> dict[str, float]:
        """The sums of all ranks divided by `count`, and the gradient norm; one that is not finite is so on all ranks.
        The device is read once. Collective."""
        here, (norm,) = totals(local_sums, self.gradient_norm() if count else 0.0)
        self.local_loss = here.get("loss", 0.0)
        # Under a loss scale an overflow is no fault: the update is skipped.
        faulty = not math.isfinite(norm) and self.mixed.scale is None
        self.faulty_gradients = self._faulty_gradients() if faulty else {}
        *sums, not_finite_norms = self.mesh.sum([*here.values(), 0.0 if math.isfinite(norm) else norm])
        means = [value / count if count else math.nan for value in sums]
        norm = norm if not_finite_norms == 0 else not_finite_norms
        return {**dict(zip(here, means, strict=True)), "gradient_norm": norm}

    def _faulty_gradients(self) -> dict[str, str]:
        """This rank's gradients that are not finite, by name, with their contents («3 NaN of 100»)."""
        named = self._named_trainable
        return not_finite((name, p.grad) for name, p in named if p.grad is not None)
