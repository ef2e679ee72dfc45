"""Whole parameters with one owner each, on CPUs: gradients are pushed to it, and new values pushed back (ZeRO 1, 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import paddle

from paddle_dp.parallel.exchange.fires import Fires
from paddle_dp.parallel.exchange.push import Push
from paddle_dp.parallel.exchange.push_reduce import PushReduce
from paddle_dp.parallel.hcg import Group


class PushedOwners:
    """Sends each rank of `group` 2 (n - 1)/n of the parameters' bytes in an update, half of them during backward.

    `owners`: a global rank for each of the `parameters`. With `each_micro_batch` gradients are exchanged in every
    backward, so that none but the owner keeps one (ZeRO-2); else in the last one of an update.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        each_micro_batch: bool = False,
    ):
        me = group.ranks[group.rank]
        self._parameters, self._owners, self._each = parameters, owners, each_micro_batch
        self._reduce = PushReduce(Push("gradients", group.ranks, me), parameters, owners)
        self._values = Push("values", group.ranks, me)
        self._fires = Fires(parameters, self._reduce.send)

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward, `last` of an update: gradients leave while it runs."""
        if not (last or self._each):
            yield
            return
        with self._fires.watched():
            yield
        self._fires.end()
        self._reduce.take()

    def finish(self) -> None:
        """After an update's last backward: owners then have the sums over the ranks. Collective."""
        self._reduce.finish()

    @paddle.no_grad()
    def share(self) -> None:
        """Sends the new values of this rank's own parameters to all others, and takes theirs. Collective."""
        pairs = list(zip(self._parameters, self._owners, strict=True))
        for place, (parameter, owner) in enumerate(pairs):
            if owner == self._values.rank:
                for other in self._values.others:
                    self._values.send(other, place, parameter)
        with self._values.waiting("the exchange of updated parameters"):
            for parameter, owner in pairs:
                if owner != self._values.rank:
                    received = self._values.receive(owner)
                    assert received is not None
                    self._values.into(parameter, received[1])
