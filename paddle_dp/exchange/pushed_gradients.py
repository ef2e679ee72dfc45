"""Exchange of gradients on CPUs during backward: each final gradient (`GradReadyHooks`) is pushed (`PushReduce`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import paddle

from paddle_dp.core.loss import Count
from paddle_dp.exchange.grad_ready_hooks import GradReadyHooks
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.push import Push
from paddle_dp.exchange.push_reduce import PushReduce
from paddle_dp.exchange.residuals import Residuals
from paddle_dp.mesh.heartbeat import heartbeat


class PushedGradients(GradientExchange):
    """Sums gradients over the global `ranks`; `rank` is this one. Each parameter's `destinations` get its sum.

    `each_micro_batch`: every backward exchanges gradients, so that only keepers hold them (ZeRO-2); otherwise the last
    one of an update does. `senders`: the number of ranks with gradients, where some ranks only keep sums. `comm_dtype`,
    `residuals`: gradients travel rounded (`PushReduce`). `channel`: one of `mesh.messages.CHANNELS`.
    """

    def __init__(  # noqa: PLR0913 - ranks, parameters, and options
        self,
        ranks: Sequence[int],
        rank: int,
        parameters: Sequence[paddle.Tensor],
        destinations: Sequence[Sequence[int]],
        *,
        each_micro_batch: bool = False,
        senders: int | None = None,
        comm_dtype: str | None = None,
        residuals: Residuals | None = None,
        channel: str = "gradients",
    ):
        self.each_micro_batch = each_micro_batch
        self._parameters = parameters
        push = Push(channel, ranks, rank)
        self._reduce = PushReduce(
            push, parameters, destinations, senders=senders, comm_dtype=comm_dtype, residuals=residuals
        )
        self._fires = GradReadyHooks(parameters, self._ready)
        self._only_final = comm_dtype is not None  # the sum of two rounded terms is not the rounded sum
        self._sent: set[int] = set()
        self._later: set[int] = set()

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        """Wraps a micro-batch's backward, `last` of an update: gradients leave while it runs."""
        if not (last or self.each_micro_batch):
            yield
            return
        with self._fires.enabled():
            yield
        if self.each_micro_batch:
            for index in sorted({*self._fires.end(), *self._later}):
                self._send(index, False)
            self._later = set()

    def finish(self) -> list[int]:
        """Called after an update's last backward: keepers get the sums. Returns the indices of parameters without a
        local gradient. Collective."""
        self._fires.end()
        without = [
            index
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is None and index not in self._sent
        ]
        self._sent, self._later = set(), set()
        self._reduce.finish()
        return without

    def _ready(self, index: int, final: bool) -> None:
        if self._only_final and not final:
            self._later.add(index)
        else:
            self._send(index, final)

    def _send(self, index: int, final: bool) -> None:
        self._sent.add(index)
        began = time.monotonic()
        self._reduce.send(index, final and not self.each_micro_batch)
        if heartbeat.tape is not None:
            heartbeat.tape.hand_over(f"gradient {index}", began)
