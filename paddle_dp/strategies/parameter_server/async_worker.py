"""Workers of an asynchronous parameter server: each pulls parameters, computes a share, and pushes its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.core import gradients
from paddle_dp.core.clip import Clip
from paddle_dp.core.loss import number
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.host_copies import bytes_on_host, to_tensors
from paddle_dp.learner.learner_checks import FrozenCheck
from paddle_dp.learner.runner import totals
from paddle_dp.mesh import transport
from paddle_dp.mesh.copies import ToHost
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.strategies.parameter_server.async_server import END, MESSAGE, PULL, PUSH, AsyncServer
from paddle_dp.strategies.parameter_server.served import ServerOwners, ServerWeights
from paddle_dp.tensors import Array, bytes_of, moved_gradient, nbytes

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


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
        self._exchange = GradientExchange()
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
        learner, counter = self._learner, self._learner.mode.counter
        self._frozen.check(may_freeze=True)
        heartbeat.enter("exchange")
        self._pull(batch.index)
        heartbeat.enter("forward")
        batch = learner.mixed.cast_batch(batch)
        local = counter.local_count(batch)
        known = None if local is None else number(local)
        divisor = batch.samples if known is None else known or 1.0
        local_sums, counted = learner.runner.run(batch, divisor, self._exchange, collect)
        count = counter.checked(number(counted) if known is None else known)
        heartbeat.enter("update")
        metrics = None
        if count:
            gradients.scale(learner.trainable, divisor / count)
            if collect:
                sums, (norm,) = totals(local_sums, gradients.global_norm(learner.trainable))
                metrics = {**sums, "gradient_norm": norm, "count": count}
            for clip in self._clips:
                norm = float(gradients.global_norm(clip.parameters).item())
                gradients.scale(clip.parameters, clip.bound / max(norm, clip.bound))
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
