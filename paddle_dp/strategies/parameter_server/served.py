"""Synchronous updates of a parameter server: workers push gradients, servers update, workers pull the parameters.

Each parameter has one server, which sends its new values to all workers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.core import gradients
from paddle_dp.core.batch_norm import RunningStatistics
from paddle_dp.core.buffers import Buffers
from paddle_dp.core.gathered_samples import GatheredSamples
from paddle_dp.core.optimizer import Clip, keep, parameters_of
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.core.placement import Coordinates, Placement, Placements
from paddle_dp.errors import UsageError
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.learner.update import GradientNorm, UpdateMode, WeightSync
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.mesh import copied_bytes, tensors_of
from paddle_dp.mesh.messages import CHANNELS, Messages, Push
from paddle_dp.plan.memory import owners
from paddle_dp.tensors import nbytes, on_host

# Exchanges tensors of all workers' layers and losses through server 0: workers are not connected to one another -------


HUB = 0  # the rank of server 0


class HostGroup:
    """The workers of a mesh, as the ranks over which a layer gathers and sums (`data_group.ProcessGroup`)."""

    def __init__(self, mesh: Mesh):
        workers = range(mesh.axes.servers, mesh.ranks)
        self._messages = Messages([HUB, *workers], mesh.rank, "sums", hub=HUB) if mesh.reads else None
        if mesh.rank == HUB:
            passed_on.serve(list(workers))

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every worker's `tensor` (equal shapes and dtypes), in rank order. Collective over the workers.

        Raises UsageError on a server.
        """
        if self._messages is None:  # a forward of the script's, after its fit
            raise UsageError(
                "this rank is a server of strategy parameter_server and has no samples: a BatchNorm in training mode "
                "exchanges with workers alone. Let the script run its forward only where trainer.mesh.reads is true."
            )
        rows = self._messages.gather(copied_bytes(tensor), "an exchange between the workers")
        return tensors_of(rows[1:], tensor)

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the workers, in place, and returns it. Collective over the workers."""
        first, *following = self.gather_tensor(tensor)
        tensor.set_value(sum(following, first))
        return tensor


class SamplesOfWorkers(GatheredSamples):
    """The samples of one micro-batch on all workers, for a loss that compares them."""

    def __init__(self, mesh: Mesh):
        # A server has no samples and no loss.
        super().__init__(range(mesh.ranks), mesh.rank, HostGroup(mesh))
        self.index = mesh.dp_rank

    def _sizes(self, count: int) -> list[int]:
        return [int(size.item()) for size in self.among.gather_tensor(paddle.to_tensor([count], "int64"))]


class PassedOn:
    """In server 0: receives one message of each worker, and sends all of them to each, in rank order, repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[bytearray]] = {}

    def serve(self, workers: list[int]) -> None:
        with self._lock:
            self._waiting = {rank: deque() for rank in workers}
        transport.endpoint().answer(CHANNELS["sums"], self._take)

    def _take(self, rank: int, data: bytearray) -> None:
        with self._lock:
            self._waiting[rank].append(data)
            if all(self._waiting.values()):
                rows = [b"", *(bytes(waiting.popleft()) for waiting in self._waiting.values())]
                packed = Messages.packed(rows)
                for worker in self._waiting:
                    transport.endpoint().send(CHANNELS["sums"], worker, packed)


passed_on = PassedOn()


@dataclass(frozen=True, kw_only=True)
class ServedPlacement(Placement):
    """`server`: the number of the server that updates a tensor, of which workers have copies. None (statistics, frozen
    weights): all ranks have it, and server 0's counts."""

    server: int | None = None

    def is_main_replica(self, at: Coordinates) -> bool:
        return self.first_copy and at["server"] == (self.server or 0)

    def is_updated_at(self, at: Coordinates) -> bool:
        return self.server in (None, at["server"])

    def is_stored_at(self, at: Coordinates) -> bool:
        return self.server is None or at["server"] in (-1, self.server)


class ServerOwners:
    """Assigns each parameter that is not frozen, as a whole, to the server with the fewest bytes so far: also one that
    `optimizer` lacks, whose gradient counts in the norm.

    Records the server of each in `placements`, and removes all parameters from `optimizer` that this rank does not own:
    on a worker all of them. Raises UsageError if a server would own nothing.
    """

    def __init__(self, model: nn.Layer, optimizer: Any, mesh: Mesh, placements: Placements):
        servers, self._at, self._placements = mesh.axes.servers, mesh.coords, placements
        trained = {id(parameter) for parameter in parameters_of(optimizer)}
        self.parameters: list[paddle.Tensor] = [p for p in model.parameters() if not p.stop_gradient]
        if len(self.parameters) < servers:
            raise UsageError(
                f"strategy.servers={servers}, but there are only {len(self.parameters)} parameters to train: some "
                "servers would own none. Set a smaller strategy.servers."
            )
        self.owners = owners(list(map(nbytes, self.parameters)), servers)
        """The server of each parameter. Its number is its rank, because servers are the first ranks."""
        for parameter, server in zip(self.parameters, self.owners, strict=True):
            placements.record(parameter, server=server)
        here = (self.parameters[index] for index in self.indices_of(mesh.rank))
        keep(optimizer, [parameter for parameter in here if id(parameter) in trained])

    def indices_of(self, server: int) -> list[int]:
        """The indices of the parameters that a server owns."""
        return [index for index, owner in enumerate(self.owners) if owner == server]

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
            for parameter, owner in self._owned:
                received = self._push.receive(owner)
                assert received is not None, "a server ends no round of values"
                write_values(parameter, received[1])


def write_values(parameter: paddle.Tensor, data: memoryview) -> None:
    """Writes a server's values into a worker's parameter, and returns when its device has them."""
    if parameter.place.is_cpu_place():
        Push.into(parameter, data)
    else:
        values = on_host(np.frombuffer(data, np.uint8)).view(parameter.dtype)
        parameter.copy_(values.reshape(parameter.shape), True)


def server_exchange(deal: ServerOwners, mesh: Mesh) -> GradientExchange:
    """Creates the exchange that sends workers' gradients to the servers that own the parameters, and sums them there.

    A worker sends a gradient as soon as the last backward produces it; from an accelerator through its host. A server
    adds up the gradients in the order of ranks, independently of their arrival.
    """
    destinations = [[owner] for owner in deal.owners]
    return PushedGradients(
        partners(mesh), mesh.rank, deal.parameters, destinations, senders=mesh.axes.dp_size
    )


class ServerNorm(GradientNorm):
    """The 2-norm of the gradients on all servers; workers hold none."""

    def __init__(self, placed: PlacedModel, clips: Sequence[Clip]):
        super().__init__(placed.trainable)
        self._mesh, self.clips = placed.mesh, clips
        servers = range(placed.mesh.axes.servers)
        self._servers = None if placed.mesh.reads else Messages(servers, placed.mesh.rank, "servers")

    def term(self) -> float:
        """The square of the norm of this server's gradients; 0 on a worker."""
        return 0.0 if self._mesh.reads else _square(self._parameters)

    def global_norm(self) -> float:
        return float(self._mesh.sum([self.term()])[0] ** 0.5)

    def to_row(self, term: float) -> float:
        return term

    def from_row(self, term: float, summed: float) -> float:
        return float(summed**0.5)

    def clip(self) -> None:
        """Collective over the servers."""
        if self._servers is None or not self.clips:
            return
        local = np.array([_square(clip.parameters) for clip in self.clips], "float64")
        rows = self._servers.gather(local.tobytes(), "the norm of the gradients")
        norms = np.sqrt(np.stack([np.frombuffer(row, "float64") for row in rows]).sum(0)).tolist()
        for clip, norm in zip(self.clips, norms, strict=True):
            gradients.clip(clip.parameters, norm, clip.bound)


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
        named = self._placed.state_without_parameters()
        rows = [{name: tensor.shape for name, tensor in named}] if self._placed.mesh.reads else []
        (shapes, *_) = (row for rows in self._placed.mesh.gather(rows) for row in rows)  # the first worker's
        for name, tensor in named:  # a forward may have replaced a buffer by one of another shape
            self._buffers.give(tensor, shapes.get(name))


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
