"""Synchronous updates of a parameter server: workers push gradients, servers update, workers pull the parameters.

Each parameter has one server, which sends its new values to all workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.core import gradients
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.clip import Clip
from paddle_dp.core.optimizer_checks import keep, parameters_of
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.placement import Placements
from paddle_dp.core.running_statistics import RunningStatistics
from paddle_dp.errors import UsageError
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.host_copies import to_tensors
from paddle_dp.exchange.push import Push
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.learner.update_mode import GradientNorm, UpdateMode
from paddle_dp.learner.weights import WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.copies import is_cpu
from paddle_dp.mesh.messages import Messages
from paddle_dp.plan.memory import owners
from paddle_dp.strategies.parameter_server.copied_gradients import CopiedGradients
from paddle_dp.tensors import nbytes


class ServerOwners:
    """Assigns each parameter that `optimizer` trains, as a whole, to the server with the fewest bytes so far.

    Records the server of each in `placements`, and removes all parameters from `optimizer` that this rank does not own:
    on a worker all of them. Raises UsageError if a server would own nothing.
    """

    def __init__(self, model: nn.Layer, optimizer: Any, mesh: Mesh, placements: Placements):
        servers, self._at, self._placements = mesh.axes.servers, mesh.coords, placements
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        self.parameters: list[paddle.Tensor] = [p for p in model.parameters() if id(p) in trained]
        if len(self.parameters) < servers:
            raise UsageError(
                f"strategy.servers={servers}, but there are only {len(self.parameters)} parameters to train: some "
                "servers would own none. Set a smaller strategy.servers."
            )
        self.owners = owners(list(map(nbytes, self.parameters)), servers)
        """The server of each parameter. Its number is its rank, because servers are the first ranks."""
        for parameter, server in zip(self.parameters, self.owners, strict=True):
            placements.record(parameter, server=server)
        keep(
            optimizer,
            [p for p, server in zip(self.parameters, self.owners, strict=True) if server == mesh.rank],
        )

    def stored(self, model: nn.Layer) -> list[paddle.Tensor]:
        """The model's parameters that this rank stores: a server those that it owns, and frozen ones."""
        return [p for p in model.parameters() if self._placements.placement_of(p).is_stored_at(self._at)]

    def free_remote(self, model: nn.Layer) -> None:
        """Frees the memory of the parameters that this rank does not store."""
        stored = {id(parameter) for parameter in self.stored(model)}
        for parameter in model.parameters():
            if id(parameter) not in stored:
                parameter._clear_data()


def partners(mesh: Mesh) -> list[int]:
    """This rank and its peers: all servers for a worker, all workers for a server."""
    servers = mesh.axes.servers
    peers = range(servers) if mesh.reads else range(servers, mesh.ranks)
    return sorted([mesh.rank, *peers])


class ServerParams:
    """Sends the new values of `parameters` from the servers in `owners`, which have updated them, to each worker.

    A worker sends no request: the end of its gradients asks for the values of the next update.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._owned = list(zip(parameters, owners, strict=True))
        self._push, self._serves = Push("values", partners(mesh), mesh.rank), not mesh.reads

    @paddle.no_grad()
    def share(self) -> None:
        """On a server, sends the values of its parameters; on a worker, waits for the values of all servers."""
        if self._serves:
            for index, (parameter, owner) in enumerate(self._owned):
                if owner == self._push.rank:
                    self._push.send_all(index, parameter)
            return
        with self._push.waiting("the parameters of the servers"):
            for owner in self._push.peers:
                self._take([parameter for parameter, server in self._owned if server == owner], owner)

    def _take(self, parameters: Sequence[paddle.Tensor], owner: int) -> None:
        """Receives the values of one server's parameters; to an accelerator they are copied together."""
        received = [self._push.receive(owner) for _ in parameters]
        data = [each[1] for each in received if each is not None]
        if is_cpu(parameters[0].place):
            for parameter, value in zip(parameters, data, strict=True):
                self._push.into(parameter, value)
        else:
            to_tensors(data, parameters)


def server_exchange(deal: ServerOwners, mesh: Mesh) -> GradientExchange:
    """Creates the exchange that sends workers' gradients to the servers that own the parameters, and sums them there.

    A worker sends a gradient as soon as the last backward produces it; from an accelerator through its host
    (`CopiedGradients`). A server adds up the gradients in the order of ranks, independently of their arrival.
    """
    among, workers = partners(mesh), mesh.axes.dp_size
    if mesh.device != "cpu":
        return CopiedGradients(among, mesh.rank, deal.parameters, deal.owners, workers)
    destinations = [[owner] for owner in deal.owners]
    return PushedGradients(among, mesh.rank, deal.parameters, destinations, senders=workers)


class ServerNorm(GradientNorm):
    """The 2-norm of the gradients on all servers; workers hold none."""

    def __init__(self, placed: PlacedModel, clips: Sequence[Clip]):
        super().__init__(placed.trainable)
        self._mesh, self.clips = placed.mesh, clips
        servers = range(placed.mesh.axes.servers)
        self._servers = None if placed.mesh.reads else Messages(servers, placed.mesh.rank, "servers")

    def measure(self) -> float:
        """The square of the norm of this server's gradients; 0 on a worker."""
        return 0.0 if self._mesh.reads else _square(self._parameters)

    def total(self) -> float:
        return float(self._mesh.sum([self.measure()])[0] ** 0.5)

    def to_row(self, measured: float) -> float:
        return measured

    def from_row(self, measured: float, summed: float) -> float:
        return float(summed**0.5)

    def clip(self) -> None:
        """Collective over the servers."""
        if self._servers is None or not self.clips:
            return
        local = np.array([_square(clip.parameters) for clip in self.clips], "float64")
        rows = self._servers.gather(local.tobytes(), "the norm of the gradients")
        norms = np.sqrt(np.stack([np.frombuffer(row, "float64") for row in rows]).sum(0)).tolist()
        for clip, norm in zip(self.clips, norms, strict=True):
            gradients.scale(clip.parameters, clip.bound / max(norm, clip.bound))


def _square(parameters: Sequence[paddle.Tensor]) -> float:
    return float(gradients.global_norm(parameters).astype("float64").square().item())


class ServerWeights(WeightSync):
    """Servers send the weights that they have updated; workers receive them."""

    def __init__(self, mode: UpdateMode, params: ServerParams):
        super().__init__(mode)
        self._params = params

    def publish(self) -> None:
        self._params.share()

    def share(self) -> None:
        self._params.share()


class ServerStatistics(RunningStatistics):
    """Also sends the first worker's statistics and buffers to the servers, which save them and run no forward."""

    def __init__(self, placed: PlacedModel, buffers: Buffers):
        super().__init__(placed.model, placed.mesh)
        self._placed, self._buffers = placed, buffers

    def sync(self) -> None:
        super().sync()
        for _, tensor in self._placed.state_without_parameters():
            self._buffers.give(tensor)


@paddle.no_grad()
def take_drawn(placed: PlacedModel) -> None:
    """Broadcasts the first worker's initial weights: an accelerator draws other numbers than a server's CPU.
    Collective."""
    for parameter in placed.model.parameters():
        stored = placed.is_stored(parameter)
        drawn = parameter.detach() if stored else paddle.empty(parameter.shape, parameter.dtype)
        placed.mesh.broadcast(drawn, placed.mesh.readers[0])
        if stored:
            parameter.copy_(drawn, False)
