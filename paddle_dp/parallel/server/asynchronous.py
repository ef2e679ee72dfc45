"""A parameter server whose workers do not wait for one another: each pulls parameters, computes a share, and pushes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.mesh import transport
from paddle_dp.mesh.copies import ToHost
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.parallel import gradients
from paddle_dp.parallel.exchange.host_copies import bytes_on_host, to_tensors
from paddle_dp.parallel.exchange.memory import Array, bytes_of, moved_gradient, nbytes
from paddle_dp.parallel.learner import NO_REMEDY, Learner
from paddle_dp.parallel.loss import number
from paddle_dp.parallel.optimizer_checks import parameters_of
from paddle_dp.parallel.passes import totals
from paddle_dp.parallel.server.async_server import END, MESSAGE, PULL, PUSH, AsyncServer
from paddle_dp.parallel.server.learner import ServedLearner


@dataclass(kw_only=True)
class AsynchronousServedLearner(ServedLearner):
    """A worker computes the shares of global batches that it claims, each with parameters that it pulls just before,
    and which may be `staleness` global batches old; a server serves whoever comes (`desk`).

    A share's gradient is that of the mean over its samples, clipped by its own norm, times the part of the global batch
    that it is. A worker may be lost: what it has not pushed another one computes.
    """

    staleness: int

    def __post_init__(self) -> None:
        super().__post_init__()
        deal, me = self.deal, self.mesh.rank
        self._indices_of_server = [
            [index for index, owner in enumerate(deal.owners) if owner == server]
            for server in range(self.mesh.axes.servers)
        ]
        self._to_host = None if self.mesh.device == "cpu" else ToHost(self.trainable[0].place)
        self.desk: AsyncServer | None = None
        if not self.mesh.reads:
            indices = self._indices_of_server[me]
            self.desk = AsyncServer(
                self.mesh,
                [deal.parameters[index] for index in indices],
                indices,
                self.staleness,
                self._update,
            )

    @property
    def asynchronous(self) -> bool:
        return True

    @property
    def computes(self) -> bool:
        return self.mesh.reads

    @property
    def _exchanged(self) -> str:
        return "updates made from shares as they come"

    @property
    def _remedy(self) -> str:
        return NO_REMEDY

    def begin_round(self) -> None:
        if self.desk is not None:
            self.desk.begin()
        else:
            # Each hears of this worker's end then, also where it has not said anything yet.
            for server in range(self.mesh.axes.servers):
                transport.endpoint().connect(server)
        heartbeat.expendable = self.mesh.rank in self.mesh.expendable

    def serve(self) -> Iterator[int]:
        assert self.desk is not None, "a worker serves nobody"
        return self.desk.serve()

    def end_of_work(self) -> None:
        for server in range(self.mesh.axes.servers):
            self._send(server, END)

    def end_round(self) -> None:
        if self.desk is not None:
            self.desk.finish()
        self.share_updates()
        Learner._after_update(self)

    def _update(self) -> None:
        self._step()

    def _step(self) -> None:
        """On a server, with gradients in its parameters."""
        if parameters_of(self.optimizer):
            self.optimizer.step()
            self.optimizer.clear_grad(set_to_zero=False)

    # What a worker does. Nothing here is collective.

    def train_share(self, batch: Batch, collect: bool) -> dict[str, float] | None:
        self._placed_trainable.check(self._may_freeze)
        heartbeat.enter("exchange")
        self._pull(batch.index)
        heartbeat.enter("forward")
        batch = self.mixed.cast_batch(batch)
        known = self.known_count(batch)
        divisor = batch.samples if known is None else known or 1.0
        local_sums, answered = self._forward_backward(batch, divisor, collect)
        count = self._checked(number(answered) if known is None else known)
        heartbeat.enter("update")
        metrics = None
        if count:
            gradients.scale(self.trainable, divisor / count)
            if collect:
                sums, (norm,) = totals(local_sums, gradients.global_norm(self.trainable))
                metrics = {**sums, "gradient_norm": norm, "count": count}
            for clip in self.clips:
                norm = float(gradients.global_norm(clip.parameters).item())
                gradients.scale(clip.parameters, clip.bound / max(norm, clip.bound))
        own = [micro_batch for micro_batch in batch.micro_batches if not micro_batch.is_dummy]
        fraction = sum(micro_batch.samples for micro_batch in own) / batch.samples
        gradients.scale(self.trainable, fraction)
        self._push(batch.index, own[0].first, fraction, bool(count))
        return metrics

    def known_count(self, batch: Batch) -> float | None:
        """Of this share alone."""
        own = self._local_count(batch)
        return None if own is None else number(own)

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    @paddle.no_grad()
    def _pull(self, batch: int) -> None:
        """The newest parameters of each server, that lets this worker begin a share of a global batch."""
        servers = range(self.mesh.axes.servers)
        for server in servers:
            self._send(server, PULL, batch)
        for server in servers:
            data, at, chunks = transport.endpoint().receive(CHANNELS["pulled"], server), 0, []
            parameters = [self.deal.parameters[index] for index in self._indices_of_server[server]]
            for parameter in parameters:
                size = nbytes(parameter)
                chunks.append(np.frombuffer(data, np.uint8, size, at))
                at += size
            if self._to_host is not None:
                to_tensors(chunks, parameters)
                continue
            for parameter, values in zip(parameters, chunks, strict=True):
                bytes_of(parameter)[:] = values

    def _push(self, batch: int, first: int, fraction: float, learned: bool) -> None:
        parameters = enumerate(self.deal.parameters)
        indices = [index for index, parameter in parameters if learned and parameter.grad is not None]
        data = self._on_host({index: moved_gradient(self.deal.parameters[index]) for index in indices})
        for server in range(self.mesh.axes.servers):
            its = [index for index in indices if self.deal.owners[index] == server]
            header = MESSAGE.pack(PUSH, batch, first, fraction, len(its)) + np.array(its, "<i8").tobytes()
            chunks = [data[index].data for index in its]
            transport.endpoint().send(CHANNELS["pushed"], server, memoryview(header), *chunks)
        for parameter in self.trainable:
            parameter.clear_gradient(False)

    def _on_host(self, gradients: Mapping[int, paddle.Tensor]) -> dict[int, Array]:
        if self._to_host is not None:
            return bytes_on_host(gradients, self._to_host)
        return {index: bytes_of(gradient) for index, gradient in gradients.items()}

    def _send(self, server: int, kind: int, batch: int = 0) -> None:
        transport.endpoint().send(
            CHANNELS["pushed"], server, memoryview(MESSAGE.pack(kind, batch, 0, 0.0, 0))
        )
