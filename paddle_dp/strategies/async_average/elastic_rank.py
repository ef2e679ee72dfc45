"""Asynchronous averaging (EASGD): ranks do not wait for each other while their weights are averaged."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.errors import UsageError
from paddle_dp.exchange.gradient_exchange import ExtraState, SavedExtraState
from paddle_dp.learner.learner_checks import FrozenCheck
from paddle_dp.mesh import transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.strategies._rounds.periodic_means import PeriodicMeans
from paddle_dp.strategies._rounds.shares import gradients_of_share
from paddle_dp.tensors import Array

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


# Elastic averaging: asynchronous ranks and a center that attract each other -------------------------------------------


ROUND = struct.Struct("<q")


class ElasticAverage:
    """The center x̃ of the ranks' weights x, split among the global `ranks`: each keeps one slice.

    A rank sends x and receives α (x - x̃), which it subtracts from its then current weights; x̃ has already gained it
    (EASGD, asynchronous: Zhang, Choromanska and LeCun 2015, arXiv:1412.6651, algorithm 1). A keeper's socket threads
    reply, also while it computes: a slow rank is not a slow keeper. `rate` is α.
    """

    def __init__(self, ranks: Sequence[int], rank: int, size: int, rate: float):
        self.ranks, self.rank, self.rate = list(ranks), rank, rate
        self.peers = [other for other in self.ranks if other != rank]
        bounds = [size * index // len(self.ranks) for index in range(len(self.ranks) + 1)]
        self._slices = {r: slice(*bounds[index : index + 2]) for index, r in enumerate(self.ranks)}
        self._lock = threading.Lock()
        self._round = 0
        self._center: Array = np.empty(0)
        self._early: list[tuple[int, int, bytearray]] = []  # rank, round and message
        self._pulled: Array | None = None  # from the local slice, in the current exchange
        if self.peers:
            transport.endpoint().answer(CHANNELS["elastic"], self._on_request)

    def begin(self, weights: Array) -> None:
        """Begins a round by setting the center to `weights` [size]. Every rank calls it with the same weights."""
        with self._lock:
            self._round += 1
            self._center = weights[self._slices[self.rank]].copy()
            due, self._early = self._early, []
            for rank, _, data in due:
                self._answer(rank, data)

    @property
    def is_under_way(self) -> bool:
        return self._pulled is not None

    def send(self, weights: Array) -> None:
        """Begins an exchange of this rank's weights [size], which must not change until `take`."""
        for other in self.peers:
            piece = weights[self._slices[other]]
            header = memoryview(ROUND.pack(self._round))
            transport.endpoint().send(CHANNELS["elastic"], other, header, piece.view(np.uint8).data)
        with self._lock:
            self._pulled = self._pull(weights[self._slices[self.rank]])

    def has_arrived(self) -> bool:
        """Whether `take` would return at once."""
        return all(transport.endpoint().arrived(CHANNELS["center"], other) for other in self.peers)

    def take(self) -> Array:
        """Waits for α (x - x̃) [size] of the current exchange. Raises LostPeerError if a keeper is gone."""
        pulled = self._pulled
        assert pulled is not None, "an exchange was begun"
        weights = {self.rank: pulled}
        for other in self.peers:
            data = transport.endpoint().receive(CHANNELS["center"], other)
            weights[other] = np.frombuffer(data, pulled.dtype)
        self._pulled = None
        return np.concatenate([weights[rank] for rank in self.ranks])

    def _pull(self, weights: Array) -> Array:
        difference = (weights - self._center) * weights.dtype.type(self.rate)
        self._center += difference
        return difference

    def _on_request(self, rank: int, data: bytearray) -> None:
        (number,) = ROUND.unpack_from(data)
        with self._lock:
            if number > self._round:  # this rank has not begun that round yet
                self._early.append((rank, number, data))
            else:
                self._answer(rank, data)

    def _answer(self, rank: int, data: bytearray) -> None:
        weights = np.frombuffer(memoryview(data)[ROUND.size :], self._center.dtype)
        answer = self._pull(weights)
        transport.endpoint().send(CHANNELS["center"], rank, answer.view(np.uint8).data)


class ElasticMeans(PeriodicMeans):
    """The weights of ranks that average only at the ends of rounds; checkpoints, saved there, hold no local weights."""

    @paddle.no_grad()
    def begin_round(self) -> None:
        self._is_alone = True
        self.start = [parameter.clone() for parameter in self.trainable]
        self.learned = 0.0
        self.diverged = self.states_diverged = True

    def extra_state(self) -> ExtraState:
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        self.diverged = self.states_diverged = False


class ElasticRank:
    """Each rank updates local weights from the shares that it claims. After `weights.periods.every` updates it sends
    them to the center variable, which is sharded over all ranks, and continues. The reply, applied after 1 to
    `staleness` further updates, pulls the weights towards the center. The rank waits only if no reply has arrived by
    then. A single rank is not pulled (EASGD, arXiv:1412.6651).

    `moving_rate`: β of EASGD, so that α = β / ranks. At the end of a round all ranks take the mean of their weights,
    weighted by samples, and of the optimizer's states; the center starts again from there.
    """

    computes = True

    def __init__(self, learner: Learner, weights: ElasticMeans, staleness: int, moving_rate: float):
        if learner.mixed.scale is not None:
            raise UsageError(
                "strategy async_average: with float16 all ranks agree on a loss scale at every step: set "
                "train.precision=bfloat16 or float32."
            )
        self._learner, self._weights, self._staleness = learner, weights, staleness
        self._frozen = FrozenCheck(learner.placed)
        size = sum(int(parameter.size) for parameter in learner.trainable)
        mesh = learner.mesh
        # A single rank would be pulled towards its past weights.
        rate = moving_rate / mesh.ranks if mesh.ranks > 1 else 0.0
        self._elastic = ElasticAverage(list(range(mesh.ranks)), mesh.rank, size, rate)
        self._age = 0  # updates since the exchange under way began
        self._since = 0  # updates since the last exchange began
        self.local_updates = 0
        self.waits = 0  # how often a rank waited because the staleness was reached

    def begin_round(self) -> None:
        self._weights.begin_round()
        self._age = self._since = 0
        self._elastic.begin(self._flat())

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        learner = self._learner
        self._frozen.check(may_freeze=True)
        count, metrics = gradients_of_share(learner, batch, collect)
        if count:
            learner.optimizer.step()
        learner.optimizer.clear_grad(set_to_zero=False)
        self._weights.learned += count
        self._exchange()
        return metrics

    def _exchange(self) -> None:
        """After a local update, applies the center's pull if it has arrived or is due, and begins the next exchange."""
        self.local_updates, self._since, self._age = self.local_updates + 1, self._since + 1, self._age + 1
        if self._elastic.is_under_way:
            arrived = self._elastic.has_arrived()
            if not arrived and self._age < self._staleness:
                return
            heartbeat.enter("exchange")
            self.waits += not arrived
            self._apply(self._elastic.take())
        if self._since >= self._weights.periods.every:
            self._elastic.send(self._flat())
            self._since = self._age = 0

    def _flat(self) -> Array:
        """A copy of all trained weights, [size], on the host."""
        return np.concatenate([_numbers(parameter).reshape(-1) for parameter in self._learner.trainable])

    @paddle.no_grad()
    def _apply(self, pull: Array) -> None:
        """Subtracts the pull of the center, [size], from the weights."""
        trainable = self._learner.trainable
        for parameter, chunk in zip(trainable, self._chunks_of(pull), strict=True):
            moved = paddle.to_tensor(chunk, place=parameter.place).reshape(parameter.shape)
            parameter.subtract_(moved.astype(parameter.dtype))

    def _chunks_of(self, flat: Array) -> Iterator[Array]:
        start = 0
        for parameter in self._learner.trainable:
            stop = start + int(parameter.size)
            yield flat[start:stop]
            start = stop

    def end_of_work(self) -> None:
        """Does nothing: the others do not wait."""

    def serve(self) -> Iterator[int]:
        raise NotImplementedError("every rank computes shares")

    @paddle.no_grad()
    def end_round(self) -> None:
        if self._elastic.is_under_way:
            self._apply(self._elastic.take())
        self._weights.end_period()


def _numbers(parameter: paddle.Tensor) -> Array:
    """A NumPy copy in float32 for bfloat16, which NumPy does not have; else in the same dtype."""
    return (parameter.astype("float32") if parameter.dtype == paddle.bfloat16 else parameter).numpy()
