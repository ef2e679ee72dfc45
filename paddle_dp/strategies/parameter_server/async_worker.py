"""A worker of an asynchronous parameter server: pulls parameters, computes a share, and pushes its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import paddle

from paddle_dp.batch import Batch
from paddle_dp.core import gradients
from paddle_dp.core.optimizer import Clip
from paddle_dp.learner.learner_checks import FrozenCheck
from paddle_dp.mesh import transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.strategies._rounds.shares import gradients_of_share
from paddle_dp.strategies.parameter_server.async_server import END, MESSAGE, PULL, PUSH
from paddle_dp.strategies.parameter_server.served import ServerOwners, ServerWeights, write_values
from paddle_dp.tensors import bytes_of, moved_gradient, nbytes

if TYPE_CHECKING:
    from paddle_dp.learner.learner import Learner


class AsyncServerWeights(ServerWeights):
    """The weights of workers that pull them for each share, however old they are; an update sends nothing."""

    description = "updates made from shares as they come"

    def publish(self) -> None:
        """Sends nothing: a server answers when a worker asks."""


class AsyncWorker:
    """A worker of asynchronous training: computes the shares of global batches that it claims, each with parameters
    that it has just pulled, and that may be `staleness` global batches old.

    A share's gradient is the gradient of the mean over its samples, clipped by its norm, times its fraction of the
    global batch. After a worker is lost, another one computes the shares that it has not pushed.
    """

    computes = True

    def __init__(self, learner: Learner, deal: ServerOwners, clips: list[Clip]):
        self._learner, self._mesh, self._deal, self._clips = learner, learner.mesh, deal, clips
        self._frozen = FrozenCheck(learner.placed)
        self._servers = range(self._mesh.axes.servers)
        self._indices_of_server = [deal.indices_of(server) for server in self._servers]

    def begin_round(self) -> None:
        # So that each server notices this worker's end, even before its first message.
        for server in self._servers:
            transport.endpoint().connect(server)
        heartbeat.expendable = self._mesh.rank in self._mesh.expendable

    def serve(self) -> Iterator[int]:
        raise NotImplementedError("only a server serves")

    def end_of_work(self) -> None:
        for server in self._servers:
            self._send(server, END)

    def end_round(self) -> None:
        self._learner.weights.share()

    # Nothing here is collective.

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
            data = memoryview(transport.endpoint().receive(CHANNELS["pulled"], server))
            for index in self._indices_of_server[server]:
                parameter = self._deal.parameters[index]
                size = nbytes(parameter)
                write_values(parameter, data[:size])
                data = data[size:]

    def _push(self, batch: int, first: int, fraction: float, counts: bool) -> None:
        parameters = enumerate(self._deal.parameters)
        indices = [index for index, parameter in parameters if counts and parameter.grad is not None]
        data = {index: bytes_of(moved_gradient(self._deal.parameters[index]).cpu()) for index in indices}
        for server in self._servers:
            its = [index for index in indices if self._deal.owners[index] == server]
            header = MESSAGE.pack(PUSH, batch, first, fraction, len(its)) + np.array(its, "<i8").tobytes()
            chunks = [data[index].data for index in its]
            transport.endpoint().send(CHANNELS["pushed"], server, memoryview(header), *chunks)
        for parameter in self._learner.trainable:
            parameter.clear_gradient(False)

    def _send(self, server: int, kind: int, batch: int = 0) -> None:
        message = MESSAGE.pack(kind, batch, 0, 0.0, 0)
        transport.endpoint().send(CHANNELS["pushed"], server, memoryview(message))
