"""Ranks that learn on their own for a while, and then average their weights: local SGD, and DiLoCo."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import paddle

from paddle_dp.batch import Batch
from paddle_dp.parallel.consistency import Replica, check_sound
from paddle_dp.parallel.data_parallel_learner import DataParallelLearner
from paddle_dp.parallel.exchange.memory import moved_gradient
from paddle_dp.parallel.extra_state import ExtraState, SavedExtraState
from paddle_dp.parallel.learner import NO_REMEDY, Accept
from paddle_dp.parallel.loss import Count, number
from paddle_dp.parallel.outer_momentum import OuterMomentum
from paddle_dp.parallel.passes import Sums
from paddle_dp.parallel.periods import LocalStates, Periods, States, write


@dataclass(kw_only=True)
class LocalLearner(DataParallelLearner):
    """Behind a warm-up each rank updates weights of its own from its share of each batch; where a period of `periods`
    ends, all take the mean of their weights (McMahan et al. 2017, arXiv:1602.05629; Stich 2019, arXiv:1805.09767).

    A local gradient is that of the mean over the rank's own samples, and the optimizer clips it as it is. Rank r, which
    has learned from n_r samples since the last mean, counts n_r / Σn in the next one: so unequal shares are exact, and
    periods of one step of plain gradient descent are data parallelism. The mean is `start` - Σ n_r/Σn (start - weights
    of r), where `start` is what all had before; these differences are exchanged as gradients are. With `outer` it takes
    a step of its own in place of the mean.

    With `optimizer_states` "averaged" each rank goes on with the mean of the optimizer's states, else with its own.
    Metrics are those of the global batch; `gradient_norm` is the root of the weighted mean of the squares of the ranks'
    own norms, and in periods of one step that of the global gradient.

    A checkpoint has the mean of the weights at that moment, and beside it what each rank needs to go on with its own.
    """

    periods: Periods
    outer: OuterMomentum | None = None
    optimizer_states: Literal["local", "averaged"] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._trained = list(zip(self._param_names, self.trainable, strict=True))
        self._states = LocalStates(self.optimizer, self._trained, self.mesh)
        self._began = False  # whether ranks learn on their own
        self._start: list[paddle.Tensor] = []  # the weights that all had when the period began
        # From how many samples, or what the loss counts, this rank has learned since then.
        self._learned = 0.0
        self._update_count = 0.0  # the same in this update
        self._is_local = False  # this update
        self._portion = 1.0 / self.mesh.ranks  # of this rank in the last mean
        self._diverged = False  # the ranks' weights differ
        self._states_diverged = False

    @property
    def _exchanged(self) -> str:
        return "weights averaged, not gradients"

    # An update of this rank alone.

    def train_batch(
        self, batch: Batch, collect_metrics: bool = False, accept: Accept | None = None
    ) -> dict[str, float] | None:
        self._is_local = self.periods.is_local(self.rate.steps + 1)
        self.periods.see(self.optimizer.get_lr())
        if not self._is_local and (self._diverged or self._states_diverged):
            self._end_learning_alone()
        if self._is_local and not self._began:
            self._begin_alone()
        return super().train_batch(batch, collect_metrics, accept)

    @paddle.no_grad()
    def _begin_alone(self) -> None:
        self._began = True
        if not self._start:
            self._start = [parameter.clone() for parameter in self.trainable]
        if self.outer is not None:
            self.outer.begin(self._start)
        if not self.periods.ends:
            self.periods.begin(self.rate.steps, self.optimizer.get_lr())

    def _end_learning_alone(self) -> None:
        """Where a resumed training has a longer warm-up than the one that was saved: its updates are those of all ranks
        together, from the same weights and states. Collective."""
        self.finalize()
        if self._states_diverged:
            self._average_states()
        self._began, self._start, self.periods.ends = False, [], 0

    def known_count(self, batch: Batch) -> float | None:
        if not self._is_local:
            return super().known_count(batch)
        own = self._local_count(batch)
        return None if own is None else self._take_count(number(own))

    def _global_count(self, counted: Count) -> float:
        return self._take_count(number(counted)) if self._is_local else super()._global_count(counted)

    def _take_count(self, count: float) -> float:
        """What this rank divides by. Without a sample of its own it makes no update, but takes part in means."""
        self._update_count = self._checked(count)
        return count or 1.0

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        return super()._exchanging(last and not self._is_local)

    def _all_reduce_gradients(self) -> None:
        if not self._is_local:
            super()._all_reduce_gradients()

    def _step(self) -> None:
        if self._is_local:
            self._step_alone()
        else:
            super()._step()

    def _step_alone(self) -> None:
        if self._update_count:
            super()._step()
        self._learned += self._update_count
        self._diverged = self._states_diverged = True
        if self.periods.is_over(self.rate.steps + 1):
            self._end_period()
            self.periods.begin(self.rate.steps + 1, self.optimizer.get_lr())

    def _after_update(self) -> None:
        if not (self._is_local and self._diverged):
            super()._after_update()

    def _metrics(self, local_sums: list[Sums], count: float) -> dict[str, float]:
        if self._is_local:
            count = self.mesh.sum([self._update_count])[0]
            self.empty = not count
        return super()._metrics(local_sums, count)

    def gradient_norm(self) -> paddle.Tensor:
        if not self._is_local:
            return super().gradient_norm()
        if self.periods.every == 1:
            with self.global_gradients():
                return super().gradient_norm()
        norm = super().gradient_norm()
        squares, counted = self.mesh.sum([self._update_count * norm.item() ** 2, self._update_count])
        return paddle.full([], sqrt(squares / counted) if counted else 0.0, norm.dtype)

    # Means over the ranks.

    @paddle.no_grad()
    def _end_period(self) -> None:
        """All ranks have the mean of their weights, or what the outer optimizer makes of it. Collective."""
        self._take_weight()
        for place, moved in enumerate(self._moved()):
            start = self._start[place]
            start.subtract_(moved if self.outer is None else self.outer.step(place, moved))
            self.trainable[place].copy_(start, False)
        if self.optimizer_states == "averaged":
            self._average_states()
        self.sync_buffers()
        self._learned, self._diverged = 0.0, False

    @paddle.no_grad()
    def _average_states(self) -> None:
        for states in self._states.by_kind():
            write(states, self._mean(states))
        self._states.average_counts(self._portion)
        self._states_diverged = False

    def _take_weight(self) -> None:
        total = self.mesh.sum([self._learned])[0]
        if total:
            self._portion = self._learned / total

    def _moved(self) -> States:
        """How far the ranks' mean has moved from the start of the period. Collective."""
        pairs = zip(self._start, self.trainable, strict=True)
        return self._summed((start - parameter) * self._portion for start, parameter in pairs)

    def _mean(self, tensors: States) -> States:
        return self._summed(None if one is None else one * self._portion for one in tensors)

    def _summed(self, values: Iterable[paddle.Tensor | None]) -> States:
        """The sums over all ranks of one value for each trained parameter, of its shape; they travel as gradients do,
        in whose place each comes as it is made. Collective."""
        for parameter, value in zip(self.trainable, values, strict=True):
            parameter.clear_gradient(False)
            if value is not None:
                parameter._copy_gradient_from(value.astype(parameter.dtype))
        self._overlapped.finish()
        return [p.grad if p.grad is None else moved_gradient(p) for p in self.trainable]

    @contextmanager
    def global_gradients(self) -> Iterator[None]:
        if not self._is_local:
            yield
            return
        local_gradients = [p.grad if p.grad is None else moved_gradient(p) for p in self.trainable]
        total = self.mesh.sum([self._update_count])[0]
        self._give(
            self._summed(
                [None if g is None else g * (self._update_count / (total or 1.0)) for g in local_gradients]
            )
        )
        try:
            yield
        finally:
            self._give(local_gradients)

    def _give(self, gradients: States) -> None:
        for parameter, gradient in zip(self.trainable, gradients, strict=True):
            parameter.clear_gradient(False)
            if gradient is not None:
                parameter._copy_gradient_from(gradient)

    @contextmanager
    def averaged(self, states: bool = False) -> Iterator[None]:
        backups: list[tuple[paddle.Tensor, paddle.Tensor]] = []
        with paddle.no_grad():
            if self._diverged:
                self._take_weight()
                backups += [(parameter, parameter.clone()) for parameter in self.trainable]
                for start, parameter, moved in zip(self._start, self.trainable, self._moved(), strict=True):
                    parameter.copy_(start - moved, False)
            if states and self._states_diverged:
                for of_kind in list(self._states.by_kind()):
                    mean = self._mean(of_kind)
                    backups += [(state, state.clone()) for state in of_kind if state is not None]
                    write(of_kind, mean)
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
        """A period that is not over ends with the plain mean."""
        if self._diverged:
            outer, self.outer = self.outer, None
            self._end_period()
            self.outer = outer
            self.periods.begin(self.rate.steps, self.optimizer.get_lr())
            super()._after_update()

    # Checks and checkpoints.

    @property
    def _remedy(self) -> str:
        return NO_REMEDY

    def check(self, when: str, states: Any = ()) -> None:
        if not (self._diverged or self._states_diverged):
            super().check(when, states)
            return
        pairs = zip(self._trained, self._start, strict=True) if self._diverged else ()
        copies = [Replica(name, start) for (name, _), start in pairs]
        copies = copies or [Replica(name, parameter) for name, parameter in self.named_parameters()]
        mine = [*self.named_parameters(), *self._buffers(), *((name, state) for name, state, _ in states)]
        check_sound(copies, mine, self.mesh, when, self._excused)

    def extra_state(self) -> ExtraState:
        if not self._began:  # but adaptive periods hang on the highest learning rate, which may be behind
            return ExtraState(
                shared={"periods": _numbers(self.periods.state())} if self.periods.adaptive else {}
            )
        named = self._trained
        shared = {"periods": _numbers(self.periods.state())}
        local = {"counts": _numbers([self._learned, self._portion])}
        if self.outer is not None:
            shared |= {f"velocity/{name}": v for (name, _), v in zip(named, self.outer.velocity, strict=True)}
        if self._diverged:
            shared |= {f"start/{name}": start for (name, _), start in zip(named, self._start, strict=True)}
            local |= {f"weight/{name}": parameter for name, parameter in named}
            local |= {f"buffer/{name}": buffer for name, buffer in self._saved_buffers()}
        if self._states_diverged:
            self._states.complete()
            local |= {f"state/{name}": state for name, state in self._states.named().items()}
        return ExtraState(shared=shared, local=local)

    def _saved_buffers(self) -> list[tuple[str, paddle.Tensor]]:
        """The buffers that forward may change from this rank's samples between means, and that checkpoints hold: of the
        first rank alone, as the model's."""
        held = {id(tensor) for tensor in self.model.state_dict().values()}
        return [(name, buffer) for name, buffer in self.named_buffers() if id(buffer) in held]

    @paddle.no_grad()
    def load_extra_state(self, saved: SavedExtraState) -> None:
        self._began = self._diverged = self._states_diverged = False
        self._start, self._learned = [], 0.0
        periods, counts = _numbers([0.0, 0.0]), _numbers([0.0, 0.0])
        if "periods" in saved.shared:
            saved.shared_into("periods", periods)
        ends, highest = periods.tolist()
        self.periods.load([ends if saved.local else 0.0, highest])
        named = self._trained
        if self.outer is not None:
            self.outer.velocity = []
            if all(f"velocity/{name}" in saved.shared for name, _ in named):
                self.outer.begin(self.trainable)
                for (name, _), velocity in zip(named, self.outer.velocity, strict=True):
                    saved.shared_into(f"velocity/{name}", velocity)
        if not saved.local or "periods" not in saved.shared:
            return
        saved.local_into("counts", counts)
        learned, self._portion = counts.tolist()
        # A parameter that was frozen then has none: all ranks go on from the mean, as on another number of ranks.
        if all(f"weight/{name}" in saved.local for name, _ in named):
            self._diverged, self._learned = True, learned
            self._load_local_weights(saved)
        states = {
            name: state for name, state in self._states.named().items() if f"state/{name}" in saved.local
        }
        self._states_diverged = bool(states)
        for name, state in states.items():
            saved.local_into(f"state/{name}", state)

    def _load_local_weights(self, saved: SavedExtraState) -> None:
        """In the midst of a period: where it began, and this rank's own weights and buffers."""
        self._start = [parameter.clone() for parameter in self.trainable]
        for (name, parameter), start in zip(self._trained, self._start, strict=True):
            saved.shared_into(f"start/{name}", start)
            saved.local_into(f"weight/{name}", parameter)
        for name, buffer in self._saved_buffers():
            if f"buffer/{name}" in saved.local:  # which earlier versions did not save
                saved.local_into(f"buffer/{name}", buffer)


def _numbers(values: Sequence[float]) -> paddle.Tensor:
    """On the host, in float64."""
    return paddle.to_tensor(list(values), "float64", place=paddle.CPUPlace())
