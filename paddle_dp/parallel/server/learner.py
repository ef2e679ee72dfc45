"""An update of a parameter server in step: workers push gradients, servers update, workers pull the parameters.

Each parameter has one server, which sends its new values to all workers; no rank keeps more of a model than it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.copies import is_cpu
from paddle_dp.mesh.messages import Messages
from paddle_dp.parallel import gradients
from paddle_dp.parallel.clip import Clip
from paddle_dp.parallel.exchange.gradient_exchange import GradientExchange
from paddle_dp.parallel.exchange.host_copies import to_tensors
from paddle_dp.parallel.exchange.memory import nbytes
from paddle_dp.parallel.exchange.push import Push
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.gathered_samples import GatheredSamples
from paddle_dp.parallel.learner import Learner
from paddle_dp.parallel.optimizer_checks import keep, parameters_of
from paddle_dp.parallel.passes import Sums, totals
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.server.copied_gradients import CopiedGradients
from paddle_dp.parallel.server.host_group import SamplesOfWorkers
from paddle_dp.plan.memory import owners


class ServerOwners:
    """The parameters that `optimizer` trains, each dealt as a whole to the server with the fewest bytes so far.

    The server of each is recorded in `placements`; `optimizer` has only this rank's own afterwards: on a worker none.
    Raises UsageError where a server would own nothing.
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
        """For each of the parameters its server's number, which is its rank, too: servers are the first ranks."""
        for parameter, server in zip(self.parameters, self.owners, strict=True):
            placements.record(parameter, server=server)
        keep(
            optimizer,
            [p for p, server in zip(self.parameters, self.owners, strict=True) if server == mesh.rank],
        )

    def stored(self, model: nn.Layer) -> list[paddle.Tensor]:
        """The model's parameters that this rank stores: a server its own, and what is frozen."""
        return [p for p in model.parameters() if self._placements.placement_of(p).is_stored_at(self._at)]

    def free_remote(self, model: nn.Layer) -> None:
        """Frees the memory of those that it does not store."""
        stored = {id(parameter) for parameter in self.stored(model)}
        for parameter in model.parameters():
            if id(parameter) not in stored:
                parameter._clear_data()


def partners(mesh: Mesh) -> list[int]:
    """This rank, and those that it talks to: a worker to all servers, a server to all workers."""
    servers = mesh.axes.servers
    others = range(servers) if mesh.reads else range(servers, mesh.ranks)
    return sorted([mesh.rank, *others])


class ServerParams:
    """The `parameters`, each updated by the server whose rank is in `owners`: a server sends its part to each worker.

    A worker need not ask: with the end of its gradients it has said that it wants the values of the update after them.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._owned = list(zip(parameters, owners, strict=True))
        self._push, self._serves = Push("values", partners(mesh), mesh.rank), not mesh.reads

    @paddle.no_grad()
    def share(self) -> None:
        """On a server: sends the values of its parameters. On a worker: waits for those of all servers."""
        if self._serves:
            for index, (parameter, owner) in enumerate(self._owned):
                if owner == self._push.rank:
                    self._push.send_all(index, parameter)
            return
        with self._push.waiting("the parameters of the servers"):
            for owner in self._push.peers:
                self._take([parameter for parameter, of in self._owned if of == owner], owner)

    def _take(self, parameters: Sequence[paddle.Tensor], owner: int) -> None:
        """The values of one server's parameters; to an accelerator they are copied together."""
        received = [self._push.receive(owner) for _ in parameters]
        data = [each[1] for each in received if each is not None]
        if is_cpu(parameters[0].place):
            for parameter, value in zip(parameters, data, strict=True):
                self._push.into(parameter, value)
        else:
            to_tensors(data, parameters)


@dataclass(kw_only=True)
class ServedLearner(Learner):
    """A worker's or a server's part of an update from all workers' shares of a global batch.

    A gradient leaves a worker for the server that owns its parameter as soon as the last backward has it; from an
    accelerator through its host (`CopiedGradients`). Servers are on hosts. The server
    adds up those of all workers in the order of ranks, whichever comes first, clips by the norm over all servers,
    updates, and sends the new values. A server has no forward: its batches have no micro-batches.
    `clips`: the optimizer's global-norm clips, taken over because a server's optimizer sees a part of the model.
    """

    deal: ServerOwners
    clips: Sequence[Clip] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        owners, axes = self.deal.owners, self.mesh.axes
        self._overlapped = self._make_exchange()
        self._values = ServerParams(self.mesh, self.deal.parameters, owners)
        self._among_servers = (
            None if self.mesh.reads else Messages(range(axes.servers), self.mesh.rank, "servers")
        )

    def _make_exchange(self) -> GradientExchange:
        """What pushes a worker's gradients, and adds them up on a server."""
        among, deal, workers = partners(self.mesh), self.deal, self.mesh.axes.dp_size
        if self.mesh.device != "cpu":
            return CopiedGradients(among, self.mesh.rank, deal.parameters, deal.owners, workers)
        keepers = [[owner] for owner in deal.owners]
        return PushedGradients(among, self.mesh.rank, deal.parameters, keepers, senders=workers)

    @paddle.no_grad()
    def take_drawn(self) -> None:
        """All ranks take the initial weights of the first worker: an accelerator draws other numbers than a server's
        CPU. Collective."""
        for parameter in self.model.parameters():
            stored = self.is_stored(parameter)
            drawn = parameter.detach() if stored else paddle.empty(parameter.shape, parameter.dtype)
            self.mesh.broadcast(drawn, self.mesh.readers[0])
            if stored:
                parameter.copy_(drawn, False)

    def _gathered_samples(self) -> GatheredSamples:
        return SamplesOfWorkers(self.mesh)

    @property
    def _may_freeze(self) -> bool:
        return True

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        return self._overlapped.backward(last)

    def _all_reduce_gradients(self) -> None:
        self._overlapped.finish()

    def _step(self) -> None:
        if self._among_servers is not None:
            for clip, norm in zip(self.clips, self._norms_of_servers(self._among_servers), strict=True):
                gradients.scale(clip.parameters, clip.bound / max(norm, clip.bound))
            if parameters_of(self.optimizer):  # whatever was frozen meanwhile
                self.optimizer.step()
        self.share_updates()

    def _norms_of_servers(self, messages: Messages) -> Iterator[float]:
        """Of the gradients of each clip, over all servers. Collective over the servers."""
        if not self.clips:
            return
        mine = np.array([self._square(clip.parameters) for clip in self.clips], "float64")
        rows = messages.gather(mine.tobytes(), "the norm of the gradients")
        squares = np.stack([np.frombuffer(row, "float64") for row in rows]).sum(0)
        yield from np.sqrt(squares).tolist()

    def _square(self, parameters: Sequence[paddle.Tensor]) -> float:
        return float(gradients.global_norm(parameters).astype("float64").square().item())

    def share_updates(self) -> None:
        self._values.share()

    def gradient_norm(self) -> paddle.Tensor:
        """Over the whole model: after the exchange each server has the gradients of its part, and workers none.
        Collective."""
        square = 0.0 if self.mesh.reads else self._square(self.trainable)
        return paddle.to_tensor(self.mesh.sum([square])[0] ** 0.5, "float64")

    def _metrics(self, local_sums: list[Sums], count: float) -> dict[str, float]:
        """As in a learner; but a server, which has no forward, hears from the workers which sums there are."""
        local, _ = totals(local_sums)
        self.local_loss = local.get("loss", 0.0)
        square = 0.0 if self.mesh.reads or not count else self._square(self.trainable)
        rows = self.mesh.gather([local, square])
        norm = sum(square for _, square in rows) ** 0.5
        faulty = not norm < float("inf") and self.mixed.scale is None
        self.faulty_gradients = self._faulty_gradients() if faulty else {}
        found = dict.fromkeys(name for sums, _ in rows for name in sums)
        of_all = {name: sum(sums.get(name, 0.0) for sums, _ in rows) for name in found}
        means = {name: total / count if count else float("nan") for name, total in of_all.items()}
        return {**means, "gradient_norm": norm}

    def sync_buffers(self) -> None:
        """Also gives servers, which save them and have no forward, the first worker's statistics and buffers.
        Collective."""
        super().sync_buffers()
        for _, tensor in self._buffers():
            self._synced_buffers.give(tensor)
