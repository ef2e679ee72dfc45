"""The exchange of gradients on CPUs, while backward runs: when one is final (`GradReadyHooks`), it is pushed
(`PushReduce`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import paddle

from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.parallel.exchange.grad_ready_hooks import GradReadyHooks
from paddle_dp.parallel.exchange.push import Push
from paddle_dp.parallel.exchange.push_reduce import PushReduce
from paddle_dp.parallel.exchange.residuals import Residuals


class PushedGradients:
    """Sums gradients over the global `ranks`, one of which is `rank`; the `destinations` of each parameter have the
    sum.

    With `each_micro_batch` gradients are exchanged in every backward, so that only keepers hold one meanwhile (ZeRO-2);
    else in the last one of an update. `senders`: how many of the ranks have gradients, where some only keep sums.
    `comm_dtype`, `residuals`: they travel rounded (`PushReduce`). `channel`: one of `mesh.messages.CHANNELS`.
    """

    def __init__(  # noqa: PLR0913 - ranks, what they exchange, and how
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
        self._only_final = comm_dtype is not None  # the sum of two rounded parts is not the rounded sum
        self._sent: set[int] = set()  # places
        self._later: set[int] = set()

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Around a micro-batch's backward, `last` of an update: gradients leave while it runs."""
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
        """After an update's last backward: keepers have the sums then. Returns the places of which this rank had no
        gradient. Collective."""
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
