"""Ranks that learn without waiting for each other; their weights are averaged while they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel import gradients
from paddle_dp.parallel.exchange.elastic_average import ElasticAverage
from paddle_dp.parallel.exchange.memory import Array
from paddle_dp.parallel.extra_state import ExtraState, SavedExtraState
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.local_learner import LocalLearner
from paddle_dp.parallel.loss import number
from paddle_dp.parallel.passes import totals


@dataclass(kw_only=True)
class AsynchronousLearner(LocalLearner):
    """Each rank updates weights of its own from the shares that it claims. After `periods.every` of its updates it
    sends them to the center that all ranks keep together, and goes on; what comes back pulls them towards the center
    after 1 to `staleness` further updates, of which it is as old. Only if it is not there by then, the rank waits. One
    rank alone is pulled by nothing.

    `moving_rate`: β of EASGD, so that α = β / ranks. At a meeting all take the mean of their weights, by the samples
    that each has learned from since the last one, and of the optimizer's states; the center begins there anew.
    """

    staleness: int
    moving_rate: float
    local_updates: int = field(default=0, init=False)
    waits: int = field(default=0, init=False)  # how often the staleness was reached

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_local = True
        self._ranks = list(range(self.mesh.ranks))
        size = sum(int(parameter.size) for parameter in self.trainable)
        # Alone a rank would be pulled to its own past.
        rate = self.moving_rate / self.mesh.ranks if self.mesh.ranks > 1 else 0.0
        self._elastic = ElasticAverage(self._ranks, self.mesh.rank, size, rate)
        self._age = 0  # updates since the exchange under way was begun
        self._since = 0  # updates since one was begun

    @property
    def asynchronous(self) -> bool:
        return True

    @paddle.no_grad()
    def begin_round(self) -> None:
        self._start = [parameter.clone() for parameter in self.trainable]
        self._learned, self._age, self._since = 0.0, 0, 0
        self._diverged = self._states_diverged = True
        self._elastic.begin(self._flat())

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        if self.mesh.ranks > 1:
            self._placed_trainable.check(self._may_freeze)
        heartbeat.enter("forward")
        batch = self.mixed.cast_batch(batch)
        known = self.known_count(batch)
        divisor = batch.samples if known is None else known
        local_sums, answered = self._forward_backward(batch, divisor, collect)
        if known is None:
            self._take_count(number(answered))
        heartbeat.enter("update")
        metrics = None
        if self._update_count:
            self._unscale(divisor / self._update_count)
            if collect:
                sums, (norm,) = totals(local_sums, gradients.global_norm(self.trainable))
                metrics = {**sums, "gradient_norm": norm, "count": self._update_count}
            self.optimizer.step()
        self.optimizer.clear_grad(set_to_zero=False)
        self._learned += self._update_count
        self._exchange()
        return metrics

    def _exchange(self) -> None:
        """After an own update: takes what the center pulls, if it is there or due, and begins the next exchange."""
        self.local_updates, self._since, self._age = self.local_updates + 1, self._since + 1, self._age + 1
        if self._elastic.is_under_way:
            there = self._elastic.has_arrived()
            if not there and self._age < self.staleness:
                return
            heartbeat.enter("exchange")
            self.waits += not there
            self._take_away(self._elastic.take())
        if self._since >= self.periods.every:
            self._elastic.send(self._flat())
            self._since = self._age = 0

    def _flat(self) -> Array:
        """A copy of all trained weights, [size], on the host."""
        return np.concatenate([_numbers(parameter).reshape(-1) for parameter in self.trainable])

    @paddle.no_grad()
    def _take_away(self, pulled: Array) -> None:
        for parameter, part in zip(self.trainable, self._pieces_of(pulled), strict=True):
            moved = paddle.to_tensor(part, place=parameter.place).reshape(parameter.shape)
            parameter.subtract_(moved.astype(parameter.dtype))

    def _pieces_of(self, flat: Array) -> Iterator[Array]:
        start = 0
        for parameter in self.trainable:
            stop = start + int(parameter.size)
            yield flat[start:stop]
            start = stop

    @paddle.no_grad()
    def end_round(self) -> None:
        if self._elastic.is_under_way:
            self._take_away(self._elastic.take())
        self._end_period()
        Learner._after_update(self)

    def extra_state(self) -> ExtraState:
        return ExtraState()  # all ranks have the same where a checkpoint is saved

    def load_extra_state(self, saved: SavedExtraState) -> None:
        self._diverged = self._states_diverged = False


def _numbers(parameter: paddle.Tensor) -> Array:
    """To calculate with: of bfloat16 NumPy would have the bits."""
    return (parameter.astype("float32") if parameter.dtype == paddle.bfloat16 else parameter).numpy()
