"""Sums of gradients at their owners, on CPUs: each gradient is pushed to its owner as soon as backward has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from paddle_dp.parallel.exchange.memory import bytes_of, dtype_of, numbers_of
from paddle_dp.parallel.exchange.push import Push


class PushReduce:
    """A reduce of each parameter's gradient to its owner, a global rank of `push`; without buckets and threads.

    A gradient travels once, straight to its owner: (n - 1)/n of all bytes leave each rank, where an all-reduce takes
    twice as many. The owner adds in the order of ranks, whatever arrives first, so that two runs have the same bits;
    those of one rank it has added before in the order in which they were sent. Ranks need not have the same gradients:
    an owner sums those that were sent until all have said that nothing more comes. 16-bit numbers are added in float32.
    """

    def __init__(self, push: Push, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._push, self._parameters, self._owners = push, parameters, owners
        self._sums: dict[int, dict[int, np.ndarray[Any, Any]]] = {}  # by place, then by rank: of what it sent
        self._ended: set[int] = set()  # ranks that send nothing more in this round

    @paddle.no_grad()
    def send(self, place: int) -> None:
        """Sends a gradient that is there to its owner, and clears it here; nothing at the owner."""
        parameter, owner = self._parameters[place], self._owners[place]
        if owner != self._push.rank and parameter.grad is not None:
            self._push.send(owner, place, parameter.grad)
            parameter.clear_gradient(False)

    def take(self) -> None:
        """Takes what has arrived, so that nothing piles up when several backwards are exchanged before `finish`."""
        for rank in self._push.others:
            while rank not in self._ended and self._push.arrived(rank):
                self._take(rank)

    @paddle.no_grad()
    def finish(self) -> None:
        """After the last backward: sends what is left; then owners have the sums, where any rank has a gradient, and
        others none. Collective."""
        for place in range(len(self._parameters)):
            self.send(place)
        for rank in self._push.others:
            self._push.end(rank)
        with self._push.waiting("the exchange of gradients"):
            for rank in self._push.others:
                while rank not in self._ended:
                    self._take(rank)
        self._ended.clear()
        for place in sorted(self._sums):
            self._add(self._parameters[place], self._sums.pop(place))

    def _take(self, rank: int) -> None:
        received = self._push.receive(rank)
        if received is None:
            self._ended.add(rank)
            return
        place, data = received
        numbers = numbers_of(data, dtype_of(self._parameters[place]))
        of_ranks = self._sums.setdefault(place, {})
        if rank in of_ranks:
            of_ranks[rank] += numbers
        else:
            of_ranks[rank] = numbers

    def _add(self, parameter: paddle.Tensor, of_ranks: dict[int, np.ndarray[Any, Any]]) -> None:
        """Adds up all ranks' gradients of an own parameter in the order of ranks."""
        gradient, dtype, own = parameter.grad, dtype_of(parameter), self._push.rank
        if gradient is not None:
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            of_ranks[own] = numbers_of(bytes_of(gradient), dtype)
        order = [rank for rank in self._push.ranks if rank in of_ranks]
        total = of_ranks[order[0]]
        for rank in order[1:]:  # in place: first in what was received, from the own gradient on in that
            total = np.add(total, of_ranks[rank], out=of_ranks[own] if rank == own else total)
        in_place = gradient is parameter.grad and dtype in ("float32", "float64")
        if gradient is None or not in_place:
            parameter.grad = paddle.to_tensor(total.reshape(parameter.shape)).astype(parameter.dtype)
