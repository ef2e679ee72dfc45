"""New values of parameters, from each one's server to all workers."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.copies import is_cpu
from paddle_dp.parallel.exchange.host_copies import to_tensors
from paddle_dp.parallel.exchange.push import Push


def partners(mesh: Mesh) -> list[int]:
    """This rank, and those that it talks to: a worker to all servers, a server to all workers."""
    servers = mesh.axes.servers
    others = range(servers) if mesh.reads else range(servers, mesh.ranks)
    return sorted([mesh.rank, *others])


class PulledValues:
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
            for place, (parameter, owner) in enumerate(self._owned):
                if owner == self._push.rank:
                    self._push.send_all(place, parameter)
            return
        with self._push.waiting("the parameters of the servers"):
            for owner in self._push.others:
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
