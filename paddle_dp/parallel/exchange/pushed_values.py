"""New values of parameters on CPUs, from each one's owner to all others."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_dp.parallel.exchange.push import Push
from paddle_dp.parallel.hcg import Group


class PushedValues:
    """The `parameters`, each updated by its owner (`owners`: global ranks of the group): (n - 1)/n of all bytes leave
    each rank."""

    def __init__(self, group: Group, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._parameters, self._owners = parameters, owners
        self._push = Push("values", group.ranks, group.ranks[group.rank])

    @paddle.no_grad()
    def share(self) -> None:
        """Sends the values of this rank's own parameters to all others, and takes theirs. Collective."""
        pairs = list(zip(self._parameters, self._owners, strict=True))
        for place, (parameter, owner) in enumerate(pairs):
            if owner == self._push.rank:
                self._push.send_all(place, parameter)
        with self._push.waiting("the exchange of updated parameters"):
            for parameter, owner in pairs:
                if owner != self._push.rank:
                    received = self._push.receive(owner)
                    assert received is not None
                    self._push.into(parameter, received[1])
