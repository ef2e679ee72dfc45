"""A server of an asynchronous parameter server: adds up the gradients of workers that do not wait for one another."""

from __future__ import annotations

import queue
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.errors import LostPeerError
from paddle_dp.mesh import transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.mesh.transport import Patience
from paddle_dp.strategies.parameter_server.served import ServerOwners
from paddle_dp.tensors import Array, bytes_from, bytes_of, dtype_of, nbytes, numbers_of

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


PULL, PUSH, END = range(3)
# A worker's message: one of these, the global batch, the first sample and the fraction of the share, and the number of
# gradients for this server; the indices of their parameters follow, int64, and the gradients.
MESSAGE = struct.Struct("<qqqdq")
FULL_BATCH = 1 - 1e-6  # the fractions of a global batch's shares add up to 1, up to rounding


@dataclass
class StalenessTracker:
    """The global batch of each worker: bounds the distance to the slowest living worker (stale synchronous parallel,
    Ho et al. 2013, NIPS).

    A worker that asks for parameters for a share of global batch k gets them when no other worker computes with
    parameters that it got for a batch before k − `staleness`. The slowest worker never waits.
    """

    staleness: int
    _at: dict[int, int] = field(default_factory=dict, init=False)
    _wants: dict[int, int] = field(default_factory=dict, init=False)
    waits: int = field(default=0, init=False)  # requests that were not answered at once

    def want(self, rank: int, batch: int) -> list[int]:
        """Records a request; returns the workers to answer now."""
        self._wants[rank] = batch
        due = self._due()
        self.waits += rank in self._wants
        return due

    def leave(self, rank: int) -> list[int]:
        """Records that a worker has computed its share, or is gone; returns the workers to answer now."""
        self._at.pop(rank, None)
        return self._due()

    def gone(self, rank: int) -> list[int]:
        self._wants.pop(rank, None)
        return self.leave(rank)

    def _due(self) -> list[int]:
        due = [
            rank
            for rank, batch in self._wants.items()
            if batch - self._slowest(rank, batch) <= self.staleness
        ]
        for rank in due:
            self._at[rank] = self._wants.pop(rank)
        return due

    def _slowest(self, rank: int, batch: int) -> int:
        return min((at for other, at in self._at.items() if other != rank), default=batch)


class AsyncServer:
    """A server of asynchronous training, which owns the parameters that `deal` assigns to it.

    Gradients of any workers are added up, weighted by their fraction of a global batch, until a full batch is covered.
    Then the learner updates with the sums in the parameters' gradients, and pulls get the new values. So the number of
    updates is the number of global batches, for any number of workers (n-softsync with n = 1: Zhang et al. 2016,
    arXiv:1511.05950).
    """

    computes = False

    def __init__(self, learner: Learner, deal: ServerOwners, staleness: int):
        self._learner, self._mesh = learner, learner.mesh
        mesh, indices = self._mesh, deal.indices_of(self._mesh.rank)
        self._parameters = [deal.parameters[index] for index in indices]
        self._local_index = dict(zip(indices, range(len(indices)), strict=True))
        self._messages: queue.SimpleQueue[tuple[int, bytearray | None]] = queue.SimpleQueue()
        self.clocks = StalenessTracker(staleness)
        self._workers, self._gone = set(range(mesh.axes.servers, mesh.ranks)), set[int]()
        self._left: set[int] = set()
        self._sums: dict[int, Array] = {}
        self._batch_fraction = 0.0  # of a global batch, received since the last full one
        self._shares: set[tuple[int, int]] = set()  # (batch, first sample) of the shares of this round
        self._values: memoryview | None = None  # of all parameters; None after an update
        self.updates = 0  # made so far
        self.oldest = 0  # the largest number of updates made while a gradient was computed
        self._began: dict[int, int] = {}
        transport.endpoint().answer(CHANNELS["pushed"], lambda rank, data: self._messages.put((rank, data)))
        transport.endpoint().notice_silence()
        transport.endpoint().when_gone("pushed", lambda rank: self._messages.put((rank, None)))

    def begin_round(self) -> None:
        """Begins a round: all its shares are new."""
        self._left, self._shares, self._values = set(), set(), None

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        raise NotImplementedError("a server computes no shares")

    def end_of_work(self) -> None:
        """Does nothing: a server has no share."""

    def serve(self) -> Iterator[int]:
        """Serves the workers until each has ended its work or is gone. Yields the global batch of each share before its
        gradients are added. Raises LostPeerError without workers, and after `Patience` without a message."""
        while not self._workers <= self._left | self._gone:
            rank, data = self._next()
            if data is None:
                self._gone.add(rank)
                if self._workers <= self._gone:
                    raise LostPeerError(
                        f"rank {self._mesh.rank}, a server, has lost the last worker, rank {rank}. See its log."
                    )
                self._answer(self.clocks.gone(rank))
                continue
            kind, batch, first, fraction, count = MESSAGE.unpack_from(data)
            if kind == PULL:
                self._answer(self.clocks.want(rank, batch))
            elif kind == END:
                self._left.add(rank)
            else:
                yield batch
                heartbeat.enter("update")
                if (batch, first) not in self._shares:  # another rank computes the share of a lost one again
                    self._shares.add((batch, first))
                    self._add(rank, data, fraction, count)
                self._answer(self.clocks.leave(rank))
                heartbeat.enter("exchange")

    def end_round(self) -> None:
        """Makes an update of the remaining gradients; shares that no worker has computed are missing."""
        if self._sums:
            self._make_update()
        self._batch_fraction = 0.0
        self._learner.weights.share()

    def _next(self) -> tuple[int, bytearray | None]:
        with heartbeat.waiting("gradients of the workers"):
            try:
                return self._messages.get(timeout=Patience.seconds)
            except queue.Empty:
                late = sorted(self._workers - self._left - self._gone)
                raise LostPeerError(
                    f"rank {self._mesh.rank}, a server, has heard nothing for {Patience.seconds:g} s, and some workers "
                    f"have not ended the round: ranks {', '.join(map(str, late))} (train.patience). See their logs."
                ) from None

    def _answer(self, ranks: Sequence[int]) -> None:
        if not ranks:
            return
        if self._values is None:
            self._values = np.concatenate([bytes_of(parameter) for parameter in self._parameters]).data
        for rank in ranks:
            self._began[rank] = self.updates
            transport.endpoint().send(CHANNELS["pulled"], rank, self._values)

    def _add(self, rank: int, data: bytearray, fraction: float, count: int) -> None:
        self.oldest = max(self.oldest, self.updates - self._began.get(rank, self.updates))
        at = MESSAGE.size + 8 * count
        for index in np.frombuffer(data, "<i8", count, MESSAGE.size).tolist():
            number = self._local_index[index]
            parameter = self._parameters[number]
            size = nbytes(parameter)
            numbers = numbers_of(memoryview(data)[at : at + size], dtype_of(parameter))
            at += size
            if number in self._sums:
                self._sums[number] += numbers
            else:
                self._sums[number] = numbers
        self._batch_fraction += fraction
        if self._batch_fraction >= FULL_BATCH:
            self._batch_fraction -= 1.0  # the excess of unequal shares counts for the next
            self._make_update()

    @paddle.no_grad()
    def _make_update(self) -> None:
        for index, total in self._sums.items():
            parameter = self._parameters[index]
            gradient: Any = paddle.empty(parameter.shape, parameter.dtype)
            bytes_of(gradient)[:] = bytes_from(total, dtype_of(parameter))
            parameter._copy_gradient_from(gradient)
        self._sums, self._values = {}, None
        self._learner.update()
        for parameter in self._learner.trainable:
            parameter.clear_gradient(False)
        self.updates += 1
