"""Exchange of gradients between hosts: each that is final in backward (`GradReadyHooks`) is pushed (`PushReduce`)."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import paddle

from paddle_dp.core.loss import Count
from paddle_dp.exchange.gradient_exchange import UNFINISHED, GradientExchange, GradReadyHooks
from paddle_dp.exchange.residuals import Residuals
from paddle_dp.exchange.roundings import roundings
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import Push
from paddle_dp.tensors import (
    Array,
    bytes_from,
    bytes_of,
    dtype_of,
    moved_gradient,
    narrowed,
    numbers_of,
)

# Elements of a segment: a larger one delays its sum, smaller ones cost a message each.
MAX_SEGMENT = 1 << 18
MIN_SHARE = (
    1 << 14
)  # elements of a keeper's share; a larger minimum would use fewer keepers and load their links unevenly


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of the flat gradient `param_index`: `owner` adds them up and `destinations` get the
    sum.

    `owner` is one of the `destinations`, which are global ranks.
    """

    param_index: int
    start: int
    stop: int
    owner: int
    destinations: tuple[int, ...]


def cut(sizes: Sequence[int], destinations: Sequence[Sequence[int]]) -> list[Segment]:
    """The segments of gradients of these `sizes`, each kept by its `destinations`, in the order of parameters.

    A gradient is divided equally among its keepers, so that all add and send as much; a small one among the few least
    loaded keepers.
    """
    added: dict[int, int] = {}
    segments = []
    for param_index, (size, ranks) in enumerate(zip(sizes, destinations, strict=True)):
        shares = max(1, min(len(ranks), size // MIN_SHARE))
        order = sorted(ranks, key=lambda rank: added.get(rank, 0))[:shares]
        for owner, (first, last) in zip(sorted(order), _ranges(0, size, shares), strict=True):
            added[owner] = added.get(owner, 0) + last - first
            for start, stop in _ranges(first, last, -(-(last - first) // MAX_SEGMENT)):
                segments.append(Segment(param_index, start, stop, owner, tuple(ranks)))
    return segments


def _ranges(first: int, last: int, count: int) -> list[tuple[int, int]]:
    """`count` ranges of nearly equal length."""
    ends = [first + (last - first) * number // max(count, 1) for number in range(max(count, 1) + 1)]
    return list(itertools.pairwise(ends))


TERM, LAST_TERM, SUM = range(3)  # kinds of message: a rank's term of a segment, its last term, the sum
KINDS = 3


class PushReduce:
    """Sums each gradient over the ranks of `push`; its `destinations`, global ranks, get the sum, others none.

    Each segment (`cut`) travels straight to its owner, which adds it up when all ranks' terms are there and sends the
    sum to the other keepers. A rank sends (n - 1)/n of all bytes where each parameter has one keeper, and 2 (n - 1)/n
    where all ranks keep all: as many as a ring. Ranks may have different gradients in any order, since there are
    neither buckets nor collectives: an owner sums the received terms when all ranks have ended the round. It adds in
    the order of ranks, and within a rank in sending order, so two runs have the same bits. 16-bit numbers are added in
    float32. `senders`: the number of ranks with gradients; all ranks by default.

    `reduce_dtype`: the dtype in which gradients travel. Each rank's gradient is rounded to it once, also in local
    segments, and so is a sum that travels to other keepers. `residuals` keep the errors and add them to the next
    gradient.
    """

    def __init__(
        self,
        push: Push,
        parameters: Sequence[paddle.Tensor],
        destinations: Sequence[Sequence[int]],
        *,
        senders: int | None = None,
        reduce_dtype: str | None = None,
        residuals: Residuals | None = None,
    ):
        self._push, self._parameters, self._me = push, parameters, push.rank
        self._senders = len(push.ranks) if senders is None else senders
        self._is_destination = [push.rank in ranks for ranks in destinations]
        self._dtypes = [dtype_of(parameter) for parameter in parameters]
        self._reduce_dtypes, self._residuals = [reduce_dtype or dtype for dtype in self._dtypes], residuals
        self._segments = cut([int(parameter.size) for parameter in parameters], destinations)
        self._segments_of: dict[int, list[int]] = defaultdict(list)
        for number, segment in enumerate(self._segments):
            self._segments_of[segment.param_index].append(number)
        self._sums_travel = any(len(ranks) > 1 for ranks in destinations)
        self._begin()

    def _begin(self) -> None:
        self._sums_of: dict[int, paddle.Tensor] = {}  # the memory of gradients that this rank keeps, by index
        # Terms of owned segments, by number and rank; `_late` has terms that followed a rank's last one.
        self._terms: dict[int, dict[int, Array]] = {}
        self._late: dict[int, dict[int, Array]] = {}
        self._complete: dict[int, set[int]] = defaultdict(set)  # ranks that have sent a segment's last term
        self._sums: dict[int, Array] = {}
        self._rounded: dict[int, Array] = {}  # rounding errors of sent sums, by number
        self._ended: set[int] = set()  # ranks that send no more terms
        self._done: set[int] = set()  # ranks that send no more sums

    @paddle.no_grad()
    def send(self, index: int, final: bool = False) -> None:
        """Sends a gradient, if there is one, and removes it from the parameter. `final`: no more is expected before
        `finish`, so its sum may be computed."""
        parameter = self._parameters[index]
        if parameter.grad is None:
            return
        gradient = moved_gradient(parameter).cpu()  # itself, but for a worker of servers on an accelerator
        self._send_bytes(index, self._to_be_sent(index, gradient), final)
        if self._is_destination[index]:
            self._sums_of.setdefault(index, gradient)
        self.take()

    def _send_bytes(self, index: int, data: Array, final: bool) -> None:
        """Sends a gradient's bytes in its `reduce_dtype`; they must not change afterwards."""
        UNFINISHED.add(id(self))
        dtype = self._reduce_dtypes[index]
        width = data.nbytes // max(int(self._parameters[index].size), 1)
        for number in self._segments_of[index]:
            segment = self._segments[number]
            chunk = data[segment.start * width : segment.stop * width]
            if segment.owner == self._me:
                self._add(number, self._me, numbers_of(chunk, dtype), final)
            else:
                kind = LAST_TERM if final else TERM
                self._push.send_bytes(segment.owner, KINDS * number + kind, chunk)

    def _to_be_sent(self, index: int, gradient: paddle.Tensor) -> Array:
        """The bytes of a gradient to send; a view of it if nothing is rounded."""
        data, dtype, reduce_dtype = bytes_of(gradient), self._dtypes[index], self._reduce_dtypes[index]
        if self._residuals is None:
            if reduce_dtype == dtype:
                return data
            numbers = numbers_of(data, dtype)
            roundings.note(self._parameters[index], numbers, reduce_dtype)
            return bytes_from(numbers, reduce_dtype)
        before, now = self._residuals.get(index), self._residuals.room(index)
        lost = _numbers_in(now)
        np.add(numbers_of(data, dtype), 0 if before is None else _numbers_in(before), out=lost)
        sent, clipped = narrowed(lost, reduce_dtype)
        if clipped:
            self._residuals.clipped.add(index)
        lost -= numbers_of(sent, reduce_dtype)
        self._residuals.lose(index, now)
        return sent

    def take(self) -> None:
        """Processes everything that has arrived, without waiting."""
        for rank in self._push.peers:
            while rank not in self._done and self._push.arrived(rank):
                self._take(rank)

    @paddle.no_grad()
    def finish(self) -> None:
        """Called after the last backward: sends the remaining gradients. Then keepers have the sums, where any rank has
        a gradient, and other ranks none. Collective."""
        for index in range(len(self._parameters)):
            self.send(index)
        self._end()
        with self._push.waiting("the exchange of gradients"):
            self._take_until(self._ended)
            for number in sorted(self._terms):
                self._add_up(number)
            for number in sorted(self._late):
                self._add_late(number)
            if self._sums_travel:
                self._end()
                self._take_until(self._done)
        self._remember_rounding()
        for index, gradient in sorted(self._sums_of.items()):
            self._parameters[index]._copy_gradient_from(gradient)  # the same memory
        self._begin()
        UNFINISHED.discard(id(self))

    def _end(self) -> None:
        for rank in self._push.peers:
            self._push.end(rank)

    def _take_until(self, ranks: set[int]) -> None:
        """Receives until all peers are in `ranks`."""
        for rank in self._push.peers:
            while rank not in ranks:
                self._take(rank)

    def _take(self, rank: int) -> None:
        received = self._push.receive(rank)
        if received is None:
            (self._done if rank in self._ended or not self._sums_travel else self._ended).add(rank)
            self._ended.add(rank)
            return
        (number, kind), data = divmod(received[0], KINDS), received[1]
        if kind == SUM:
            self._keep(
                number, np.frombuffer(data, np.uint8), self._reduce_dtypes[self._segments[number].param_index]
            )
        else:
            numbers = numbers_of(data, self._reduce_dtypes[self._segments[number].param_index])
            self._add(number, rank, numbers, kind == LAST_TERM)

    def _add(self, number: int, rank: int, numbers: Array, final: bool) -> None:
        """Adds a rank's term of an owned segment."""
        by_segment = self._late if rank in self._complete[number] else self._terms
        terms = by_segment.setdefault(number, {})
        if rank in terms:
            terms[rank] += numbers
        else:
            terms[rank] = numbers
        if final:
            self._complete[number].add(rank)
            if len(self._complete[number]) == self._senders and number in self._terms:
                self._add_up(number)

    def _add_up(self, number: int) -> None:
        """Adds the terms of an owned segment in the order of ranks, and sends the sum to its keepers."""
        terms = self._terms.pop(number)
        first, *rest = [rank for rank in self._push.ranks if rank in terms]
        total = terms[first]
        if first == self._me:  # its memory is the gradient's, and bytes in transit must not change
            total = np.add(total, terms[rest[0]], out=terms[rest.pop(0)]) if rest else total.copy()
        for rank in rest:
            total += terms[rank]
        self._give(number, total)

    def _add_late(self, number: int) -> None:
        """Adds terms that followed a rank's last one: it used the parameter more often than in the previous round."""
        late = self._late[number]
        total = self._sums[number].copy()
        for rank in (rank for rank in self._push.ranks if rank in late):
            total += late[rank]
        self._give(number, total)

    def _give(self, number: int, total: Array) -> None:
        self._sums[number] = total
        segment = self._segments[number]
        if segment.destinations == (self._me,):  # the sum does not travel, so it is not rounded
            dtype = self._dtypes[segment.param_index]
            self._keep(number, bytes_from(total, dtype), dtype)
            return
        dtype = self._reduce_dtypes[segment.param_index]
        if self._residuals is None:
            data = bytes_from(total, dtype)
            if dtype != self._dtypes[segment.param_index]:
                roundings.note(self._parameters[segment.param_index], total, dtype)
        else:
            data, clipped = narrowed(total, dtype)
            if clipped:
                self._residuals.clipped.add(segment.param_index)
            self._rounded[number] = total - numbers_of(data, dtype)
        for rank in segment.destinations:
            if rank != self._me:
                self._push.send_bytes(rank, KINDS * number + SUM, data)
        self._keep(number, data, dtype)

    def _remember_rounding(self) -> None:
        """Adds the rounding errors of sums to this rank's residuals."""
        for number, lost in self._rounded.items():
            segment = self._segments[number]
            assert self._residuals is not None
            _numbers_in(self._residuals.opened(segment.param_index))[segment.start : segment.stop] += lost

    def _keep(self, number: int, data: Array, dtype: str) -> None:
        """Writes a sum, bytes of this dtype, into the gradient's memory."""
        segment = self._segments[number]
        if segment.param_index not in self._sums_of:
            parameter = self._parameters[segment.param_index]
            self._sums_of[segment.param_index] = paddle.empty(parameter.shape, parameter.dtype)
        total = self._sums_of[segment.param_index]
        width, dtype_of_param = total.element_size(), self._dtypes[segment.param_index]
        bytes_of(total)[segment.start * width : segment.stop * width] = (
            data if dtype_of_param == dtype else bytes_from(numbers_of(data, dtype), dtype_of_param)
        )


def _numbers_in(tensor: paddle.Tensor) -> Array:
    """A view of a float32 or float64 tensor."""
    return numbers_of(bytes_of(tensor), dtype_of(tensor))


class PushedGradients(GradientExchange):
    """Sums gradients over the global `ranks`; `rank` is this one. Each parameter's `destinations` get its sum.

    `each_micro_batch`: every backward exchanges gradients, so that only keepers hold them (ZeRO-2); otherwise the last
    one of an update does. `senders`: the number of ranks with gradients, where some ranks only keep sums.
    `reduce_dtype`, `residuals`: gradients travel rounded (`PushReduce`). `channel`: one of `mesh.messages.CHANNELS`.
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
        reduce_dtype: str | None = None,
        residuals: Residuals | None = None,
        channel: str = "gradients",
    ):
        self.each_micro_batch = each_micro_batch
        self._parameters = parameters
        push = Push(channel, ranks, rank)
        self._reduce = PushReduce(
            push, parameters, destinations, senders=senders, reduce_dtype=reduce_dtype, residuals=residuals
        )
        self._ready_hooks = GradReadyHooks(parameters, self._ready)
        self._only_final = reduce_dtype is not None  # the sum of two rounded terms is not the rounded sum
        self._sent: set[int] = set()
        self._later: set[int] = set()

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        """Wraps a micro-batch's backward, `last` of an update: gradients leave while it runs."""
        if not (last or self.each_micro_batch):
            yield
            return
        with self._ready_hooks.enabled():
            yield
        if self.each_micro_batch:
            for index in sorted({*self._ready_hooks.end(), *self._later}):
                self._send(index, False)
            self._later = set()

    def finish(self) -> list[int]:
        """Called after an update's last backward: keepers get the sums. Returns the indices of parameters without a
        local gradient. Collective."""
        self._ready_hooks.end()
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
