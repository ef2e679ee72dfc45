"""Workers of an asynchronous parameter server: each pulls parameters, computes a share, and pushes its gradients."""

from __future__ import annotations

import queue
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.core import gradients
from paddle_dp.core.optimizer import Clip
from paddle_dp.errors import LostPeerError
from paddle_dp.exchange.host_copies import bytes_on_host, to_tensors
from paddle_dp.learner.learner_checks import FrozenCheck
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.copies import ToHost
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.mesh.transport import Patience
from paddle_dp.strategies._alone import gradients_of_share
from paddle_dp.strategies.parameter_server.served import ServerOwners, ServerWeights
from paddle_dp.tensors import Array, bytes_from, bytes_of, dtype_of, moved_gradient, nbytes, numbers_of

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


# Asynchronous parameter server with bounded staleness -----------------------------------------------------------------


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
    """A server of asynchronous training. `parameters`: that it owns; `indices`: their indices in the model.

    Gradients of any workers are added up, weighted by their fraction of a global batch, until a full batch is covered.
    Then `update` is called with the sums in the parameters' gradients, and pulls get the new values. So the number of
    updates is the number of global batches, for any number of workers (n-softsync with n = 1: Zhang et al. 2016,
    arXiv:1511.05950).
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Sequence[paddle.Tensor],
        indices: Sequence[int],
        staleness: int,
        update: Callable[[], None],
    ):
        self._mesh, self._parameters, self._update = mesh, parameters, update
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

    def begin(self) -> None:
        """Begins a round: all its shares are new."""
        self._left, self._shares, self._values = set(), set(), None

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

    def finish(self) -> None:
        """Makes an update of the remaining gradients; shares that no worker has computed are missing."""
        if self._sums:
            self._make_update()
        self._batch_fraction = 0.0

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
        self._update()
        self.updates += 1


class AsyncServerWeights(ServerWeights):
    """The weights of workers that pull them for each share, however old they are; an update sends nothing."""

    description = "updates made from shares as they come"

    def publish(self) -> None:
        """Sends nothing: a server answers when a worker asks."""


class AsyncServerWorker:
    """A worker or a server of asynchronous training. A worker computes the shares of global batches that it claims,
    each with parameters that it has just pulled, and that may be `staleness` global batches old. A server runs
    `AsyncServer`.

    A share's gradient is the gradient of the mean over its samples, clipped by its norm, times its fraction of the
    global batch. After a worker is lost, another one computes the shares that it has not pushed.
    """

    def __init__(self, learner: Learner, deal: ServerOwners, clips: list[Clip], staleness: int):
        self._learner, self._mesh, self._deal, self._clips = learner, learner.mesh, deal, clips
        self._frozen = FrozenCheck(learner.placed)
        self.computes = self._mesh.reads
        self._servers = range(self._mesh.axes.servers)
        self._indices_of_server = [
            [index for index, owner in enumerate(deal.owners) if owner == server] for server in self._servers
        ]
        self._to_host = None if self._mesh.device == "cpu" else ToHost(learner.trainable[0].place)
        self._server: AsyncServer | None = None
        if not self._mesh.reads:
            indices = self._indices_of_server[self._mesh.rank]
            parameters = [deal.parameters[index] for index in indices]
            self._server = AsyncServer(self._mesh, parameters, indices, staleness, self._update)

    def begin_round(self) -> None:
        if self._server is not None:
            self._server.begin()
        else:
            # So that each server notices this worker's end, even before its first message.
            for server in self._servers:
                transport.endpoint().connect(server)
        heartbeat.expendable = self._mesh.rank in self._mesh.expendable

    def serve(self) -> Iterator[int]:
        assert self._server is not None, "only a server serves"
        return self._server.serve()

    def end_of_work(self) -> None:
        for server in self._servers:
            self._send(server, END)

    def end_round(self) -> None:
        if self._server is not None:
            self._server.finish()
        self._learner.weights.share()

    def _update(self) -> None:
        """On a server, with gradients in its parameters."""
        self._learner.update()
        for parameter in self._learner.trainable:
            parameter.clear_gradient(False)

    # On a worker. Nothing here is collective.

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        learner = self._learner
        self._frozen.check(may_freeze=True)
        heartbeat.enter("exchange")
        self._pull(batch.index)
        count, metrics = gradients_of_share(learner, batch, collect)
        if count:
            for clip in self._clips:
                norm = float(gradients.global_norm(clip.parameters).item())
                gradients.clip(clip.parameters, norm, clip.bound)
        micro_batches = [micro_batch for micro_batch in batch.micro_batches if not micro_batch.is_dummy]
        fraction = sum(micro_batch.samples for micro_batch in micro_batches) / batch.samples
        gradients.scale(learner.trainable, fraction)
        self._push(batch.index, micro_batches[0].first, fraction, bool(count))
        return metrics

    @paddle.no_grad()
    def _pull(self, batch: int) -> None:
        """Waits for the newest parameters of each server for a share of this global batch, and copies them in."""
        for server in self._servers:
            self._send(server, PULL, batch)
        for server in self._servers:
            data, at, chunks = transport.endpoint().receive(CHANNELS["pulled"], server), 0, []
            parameters = [self._deal.parameters[index] for index in self._indices_of_server[server]]
            for parameter in parameters:
                size = nbytes(parameter)
                chunks.append(np.frombuffer(data, np.uint8, size, at))
                at += size
            if self._to_host is not None:
                to_tensors(chunks, parameters)
                continue
            for parameter, values in zip(parameters, chunks, strict=True):
                bytes_of(parameter)[:] = values

    def _push(self, batch: int, first: int, fraction: float, counts: bool) -> None:
        parameters = enumerate(self._deal.parameters)
        indices = [index for index, parameter in parameters if counts and parameter.grad is not None]
        data = self._on_host({index: moved_gradient(self._deal.parameters[index]) for index in indices})
        for server in self._servers:
            its = [index for index in indices if self._deal.owners[index] == server]
            header = MESSAGE.pack(PUSH, batch, first, fraction, len(its)) + np.array(its, "<i8").tobytes()
            chunks = [data[index].data for index in its]
            transport.endpoint().send(CHANNELS["pushed"], server, memoryview(header), *chunks)
        for parameter in self._learner.trainable:
            parameter.clear_gradient(False)

    def _on_host(self, gradients: Mapping[int, paddle.Tensor]) -> dict[int, Array]:
        if self._to_host is not None:
            return bytes_on_host(gradients, self._to_host)
        return {index: bytes_of(gradient) for index, gradient in gradients.items()}

    def _send(self, server: int, kind: int, batch: int = 0) -> None:
        message = MESSAGE.pack(kind, batch, 0, 0.0, 0)
        transport.endpoint().send(CHANNELS["pushed"], server, memoryview(message))
