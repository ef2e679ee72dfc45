"""Local SGD and DiLoCo: ranks update local weights for a period, and then average them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

import paddle

from paddle_dp.batch import Batch
from paddle_dp.core.batch_norm import RunningStatistics
from paddle_dp.core.consistency import Replica
from paddle_dp.core.loss import Count, number
from paddle_dp.core.optimizer import Rate
from paddle_dp.core.placed_model import NamedTensors, PlacedModel
from paddle_dp.exchange.gradient_exchange import ExtraState, GradientExchange, SavedExtraState
from paddle_dp.learner.update import Counter, GradientNorm, States, UpdateMode, WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.strategies._rounds.periods import LocalStates, Periods, Tensors, write
from paddle_dp.tensors import moved_gradient


@dataclass(kw_only=True)
class OuterMomentum:
    """velocity = momentum · velocity + gradient.

    The step is `learning_rate` × velocity, or with `nesterov` × (gradient + momentum · velocity). The gradient is the
    weights at the period's start minus the ranks' weighted mean.
    """

    learning_rate: float
    momentum: float
    nesterov: bool
    velocity: list[paddle.Tensor] = field(default_factory=list, init=False)  # empty before the first step

    def begin(self, weights: Sequence[paddle.Tensor]) -> None:
        """Initializes the velocities of these weights with 0, unless they exist."""
        if not self.velocity:
            self.velocity = [paddle.zeros_like(weight) for weight in weights]

    def step(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        """The step to subtract from parameter `index`."""
        velocity = self.velocity[index]
        velocity.scale_(self.momentum)
        velocity.add_(gradient)
        return (gradient + velocity * self.momentum if self.nesterov else velocity) * self.learning_rate


@dataclass
class LocalCounter(Counter):
    """The loss's count on this rank. A rank without a sample makes no update, but takes part in means."""

    count: float = field(default=0.0, init=False)  # of this update

    @property
    def steps(self) -> bool:
        return self.count > 0

    def known_count(self, batch: Batch) -> float | None:
        local = self.local_count(batch)
        return None if local is None else self.final_count(local)

    def final_count(self, counted: Count) -> float:
        self.count = self.checked(number(counted))
        return self.count or 1.0

    def global_count(self, count: float) -> float:
        return self.mesh.sum([self.count])[0]


class MeanSquareNorm(GradientNorm):
    """The weighted quadratic mean of the ranks' local norms; with periods of one step, the norm of the global
    gradient."""

    def __init__(self, means: PeriodicMeans, zero_dtype: str):
        super().__init__(means.trainable, zero_dtype)
        self._means = means

    def term(self) -> paddle.Tensor:
        if self._means.periods.every == 1:
            with self._means.global_gradients():
                return super().term()
        norm, count = super().term(), self._means.counter.count
        squares, counted = self._means.mesh.sum([count * norm.item() ** 2, count])
        return paddle.full([], sqrt(squares / counted) if counted else 0.0, norm.dtype)


class PeriodicMeans(WeightSync):
    """After a warm-up, each rank updates local weights from its share of each batch. At the end of each period all
    ranks take the mean of their weights (McMahan et al. 2017, arXiv:1602.05629; Stich 2019, arXiv:1805.09767).

    A local gradient is the gradient of the mean over the rank's samples; the optimizer clips it unchanged. Rank r, with
    n_r samples since the last mean, has the weight n_r / Σn in the next one. So unequal shares are exact, and periods
    of one step of plain gradient descent are data parallelism. The mean is `start` - Σ n_r/Σn (start - weights of r),
    where `start` are the common weights at the period's beginning; these differences are exchanged like gradients. With
    `outer`, an optimizer steps by them in place of the mean.

    With `optimizer_states` "averaged" each rank continues with the mean of the optimizer's states, else with local
    ones. Metrics are over the global batch. A checkpoint has the mean of the weights at that moment, and in addition
    each rank's local ones.
    """

    description = "weights averaged, not gradients"

    def __init__(  # noqa: PLR0913 - a placed model's parts, and the three settings of the strategy
        self,
        together: UpdateMode,
        placed: PlacedModel,
        rate: Rate,
        statistics: RunningStatistics,
        periods: Periods,
        outer: OuterMomentum | None = None,
        optimizer_states: Literal["local", "averaged"] = "local",
        zero_dtype: str = "float32",
    ):
        super().__init__(together)
        self.mesh: Mesh = placed.mesh
        self.trainable = placed.trainable
        self.periods, self._outer, self._averages_states = periods, outer, optimizer_states == "averaged"
        self._placed, self._rate, self._statistics = placed, rate, statistics
        self._named = list(zip(placed.trainable_names, placed.trainable, strict=True))
        self._states = LocalStates(rate.optimizer, self._named, placed.mesh)
        self.counter = LocalCounter(together.counter.loss, placed.mesh)
        self.alone = UpdateMode(
            exchange=GradientExchange(), counter=self.counter, norm=MeanSquareNorm(self, zero_dtype)
        )
        self._is_alone = False  # whether ranks make the present update alone
        self._began = False  # whether the warm-up has ended
        self._loaded = (
            False  # whether a checkpoint's local state is loaded, which the next local update continues
        )
        self.start: list[paddle.Tensor] = []  # the common weights at the period's beginning
        self.learned = 0.0  # the loss's count on this rank since then
        self._portion = 1.0 / placed.mesh.ranks  # of this rank in the last mean
        self.states_diverged = False

    # An update of this rank alone.

    def begin_update(self, number: int) -> UpdateMode:
        self._is_alone = self.periods.is_local(number)
        self.periods.see(self._rate.optimizer.get_lr())
        if not self._is_alone and (self.diverged or self.states_diverged):
            self._end_learning_alone()
        if self._is_alone and not (self._began and self.start):
            self._begin_alone()
        return self.alone if self._is_alone else self.mode

    @paddle.no_grad()
    def _begin_alone(self) -> None:
        self._began = True
        if not self.start:
            self.start = [parameter.clone() for parameter in self.trainable]
        if self._outer is not None:
            self._outer.begin(self.start)
        if not self.periods.ends:
            self.periods.begin(self._rate.steps, self._rate.optimizer.get_lr())

    def _end_learning_alone(self) -> None:
        """Averages weights and states, after a resume with a longer warm-up than before: ranks update together again.
        Collective."""
        self.finalize()
        if self.states_diverged:
            self._average_states()
        self._began = self._loaded = False
        self.start, self.periods.ends = [], 0

    def publish(self) -> None:
        if not self._is_alone:
            return
        self.learned += self.counter.count
        self.diverged = self.states_diverged = True
        if self.periods.is_over(self._rate.steps + 1):
            self.end_period()
            self.periods.begin(self._rate.steps + 1, self._rate.optimizer.get_lr())

    # Means over the ranks.

    @paddle.no_grad()
    def end_period(self) -> None:
        """Gives all ranks the mean of their weights, or the result of the outer optimizer's step. Collective."""
        self._take_portion()
        for index, moved in enumerate(self._moved()):
            start = self.start[index]
            start.subtract_(moved if self._outer is None else self._outer.step(index, moved))
            self.trainable[index].copy_(start, False)
        if self._averages_states:
            self._average_states()
        self._statistics.sync()
        self.learned, self.diverged = 0.0, False

    @paddle.no_grad()
    def _average_states(self) -> None:
        for states in self._states.by_kind():
            write(states, self._mean(states))
        self._states.average_counts(self._portion)
        self.states_diverged = False

    def _take_portion(self) -> None:
        total = self.mesh.sum([self.learned])[0]
        if total:
            self._portion = self.learned / total

    def _moved(self) -> Tensors:
        """The start of the period minus the ranks' mean, by parameter. Collective."""
        pairs = zip(self.start, self.trainable, strict=True)
        return self._summed((start - parameter) * self._portion for start, parameter in pairs)

    def _mean(self, tensors: Tensors) -> Tensors:
        return self._summed(None if tensor is None else tensor * self._portion for tensor in tensors)

    def _summed(self, values: Iterable[paddle.Tensor | None]) -> Tensors:
        """The sums over all ranks of one value for each trained parameter, of its shape, exchanged in `parameter.grad`.
        Collective."""
        for parameter, value in zip(self.trainable, values, strict=True):
            parameter.clear_gradient(False)
            if value is not None:
                parameter._copy_gradient_from(value.astype(parameter.dtype))
        self.mode.exchange.finish()
        return self._moved_gradients()

    def _moved_gradients(self) -> Tensors:
        return [p.grad if p.grad is None else moved_gradient(p) for p in self.trainable]

    @contextmanager
    def global_gradients(self) -> Iterator[None]:
        if not self._is_alone:
            yield
            return
        local_gradients, count = self._moved_gradients(), self.counter.count
        total = self.mesh.sum([count])[0]
        self._set_gradients(
            self._summed([None if g is None else g * (count / (total or 1.0)) for g in local_gradients])
        )
        try:
            yield
        finally:
            self._set_gradients(local_gradients)

    def _set_gradients(self, gradients: Tensors) -> None:
        for parameter, gradient in zip(self.trainable, gradients, strict=True):
            parameter.clear_gradient(False)
            if gradient is not None:
                parameter._copy_gradient_from(gradient)

    @contextmanager
    def means(self, states: bool = False) -> Iterator[None]:
        backups: list[tuple[paddle.Tensor, paddle.Tensor]] = []
        with paddle.no_grad():
            if self.diverged:
                self._take_portion()
                backups += [(parameter, parameter.clone()) for parameter in self.trainable]
                for start, parameter, moved in zip(self.start, self.trainable, self._moved(), strict=True):
                    parameter.copy_(start - moved, False)
            if states and self.states_diverged:
                for kind_states in list(self._states.by_kind()):
                    mean = self._mean(kind_states)
                    backups += [(state, state.clone()) for state in kind_states if state is not None]
                    write(kind_states, mean)
                backups += [(count, count.clone()) for count in self._states.counts().values()]
                self._states.average_counts(self._portion)
        try:
            yield
        finally:
            with paddle.no_grad():
                for tensor, backup in backups:
                    tensor.copy_(backup, False)

    @paddle.no_grad()
    def finalize(self) -> None:
        """Ends an unfinished period with the plain mean. The next one begins at the weights of the next `fit`, which a
        script may have changed until then."""
        if self.diverged:
            outer, self._outer = self._outer, None
            self.end_period()
            self._outer = outer
            self.periods.begin(self._rate.steps, self._rate.optimizer.get_lr())
            self.after_equal()
        self.start = []

    # Checks and checkpoints.

    def compared(self, placed: PlacedModel, states: States) -> tuple[list[Replica], NamedTensors]:
        if not (self.diverged or self.states_diverged):
            return super().compared(placed, states)
        named = placed.named_parameters()
        pairs = zip(self._named, self.start, strict=True) if self.diverged else ()
        replicas = [Replica(name, start) for (name, _), start in pairs]
        replicas = replicas or [Replica(name, parameter) for name, parameter in named]
        local = [*named, *placed.state_without_parameters(), *((name, state) for name, state, _ in states)]
        return replicas, local

    def extra_state(self) -> ExtraState:
        if not (self._began or self._loaded):  # adaptive periods depend on the highest learning rate so far
            periods = {"periods": _numbers(self.periods.state())} if self.periods.adaptive else {}
            return ExtraState(shared=periods)
        shared = {"periods": _numbers(self.periods.state())}
        local = {"counts": _numbers([self.learned, self._portion])}
        if self._outer is not None and self._outer.velocity:
            velocities = zip(self._named, self._outer.velocity, strict=True)
            shared |= {f"velocity/{name}": velocity for (name, _), velocity in velocities}
        if self.diverged:
            shared |= {
                f"start/{name}": start for (name, _), start in zip(self._named, self.start, strict=True)
            }
            local |= {f"weight/{name}": parameter for name, parameter in self._named}
            local |= {f"buffer/{name}": buffer for name, buffer in self._saved_buffers()}
        if self.states_diverged:
            self._states.complete()
            local |= {f"state/{name}": state for name, state in self._states.named().items()}
        return ExtraState(shared=shared, local=local)

    def _saved_buffers(self) -> NamedTensors:
        """The buffers that a forward may change from this rank's samples between means, and that checkpoints hold (as
        the model's, from the first rank only)."""
        saved_ids = {id(tensor) for tensor in self._placed.model.state_dict().values()}
        return [(name, buffer) for name, buffer in self._placed.named_buffers() if id(buffer) in saved_ids]

    @paddle.no_grad()
    def load_extra_state(self, saved: SavedExtraState) -> None:
        self._began = self.diverged = self.states_diverged = False
        self.start, self.learned, self._loaded = [], 0.0, False
        periods, counts = _numbers([0.0, 0.0]), _numbers([0.0, 0.0])
        if "periods" in saved.shared:
            saved.shared_into("periods", periods)
        ends, highest = periods.tolist()
        self.periods.load([ends if saved.local else 0.0, highest])
        if self._outer is not None:
            self._load_velocity(self._outer, saved)
        if not saved.local or "periods" not in saved.shared:
            return
        self._loaded = True
        saved.local_into("counts", counts)
        learned, self._portion = counts.tolist()
        # A parameter frozen then has none: all continue from the mean, as on another number of ranks.
        if all(f"weight/{name}" in saved.local for name, _ in self._named):
            self.diverged, self.learned = True, learned
            self._load_local_weights(saved)
        named = self._states.named().items()
        states = {name: state for name, state in named if f"state/{name}" in saved.local}
        self.states_diverged = bool(states)
        for name, state in states.items():
            saved.local_into(f"state/{name}", state)

    def _load_velocity(self, outer: OuterMomentum, saved: SavedExtraState) -> None:
        outer.velocity = []
        if all(f"velocity/{name}" in saved.shared for name, _ in self._named):
            outer.begin(self.trainable)
            for (name, _), velocity in zip(self._named, outer.velocity, strict=True):
                saved.shared_into(f"velocity/{name}", velocity)

    def _load_local_weights(self, saved: SavedExtraState) -> None:
        """Loads, within a period, the weights at its start, and this rank's local weights and buffers."""
        self.start = [parameter.clone() for parameter in self.trainable]
        for (name, parameter), start in zip(self._named, self.start, strict=True):
            saved.shared_into(f"start/{name}", start)
            saved.local_into(f"weight/{name}", parameter)
        for name, buffer in self._saved_buffers():
            saved.local_into(f"buffer/{name}", buffer)


def _numbers(values: Sequence[float]) -> paddle.Tensor:
    """A tensor on the host, in float64."""
    return paddle.to_tensor(list(values), "float64", place=paddle.CPUPlace())
