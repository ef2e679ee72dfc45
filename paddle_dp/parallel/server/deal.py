"""Which server updates which parameter, and what each rank keeps of a model."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.exchange.memory import nbytes
from paddle_dp.parallel.given_optimizer import keep, parameters_of
from paddle_dp.parallel.placement import Placements
from paddle_dp.plan.memory import owners


class Deal:
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
        return [p for p in model.parameters() if self._placements.of(p).is_stored_at(self._at)]

    def free_others(self, model: nn.Layer) -> None:
        """Frees the memory of those that it does not store."""
        kept = {id(parameter) for parameter in self.stored(model)}
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter._clear_data()
