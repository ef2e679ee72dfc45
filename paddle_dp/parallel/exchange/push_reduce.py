"""Sums of gradients on CPUs: each is pushed to who adds it up as soon as backward has it, the sum to its keepers.

Which rank adds up which numbers of each gradient is arithmetic (`cut`), without processes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from paddle_dp.parallel.exchange.error_memory import ErrorMemory
from paddle_dp.parallel.exchange.memory import (
    Array,
    bytes_from,
    bytes_of,
    dtype_of,
    moved_gradient,
    narrowed,
    numbers_of,
)
from paddle_dp.parallel.exchange.push import Push
from paddle_dp.parallel.exchange.roundings import roundings

# Numbers of a piece: a larger one waits too long for its sum, smaller ones cost a message each.
MOST = 1 << 18
LEAST = 1 << 14  # numbers of a keeper's share: with fewer keepers' shares a link is busier than the others


@dataclass(frozen=True)
class Piece:
    """The numbers from `start` to `stop` of the flat gradient at `place`, which `owner` adds up; `keepers` get the sum.

    `owner` is one of the `keepers`, which are global ranks.
    """

    place: int
    start: int
    stop: int
    owner: int
    keepers: tuple[int, ...]


def cut(sizes: Sequence[int], keepers: Sequence[Sequence[int]]) -> list[Piece]:
    """The pieces of gradients of these `sizes`, each of which its `keepers` keep; in the order of places.

    A gradient's numbers are shared equally among its keepers, so that all add and send as much, whatever the sizes; a
    small gradient's among some of them, those with the fewest.
    """
    added: dict[int, int] = {}
    pieces = []
    for place, (size, of_place) in enumerate(zip(sizes, keepers, strict=True)):
        shares = max(1, min(len(of_place), size // LEAST))
        order = sorted(of_place, key=lambda rank: added.get(rank, 0))[:shares]
        for owner, (first, last) in zip(sorted(order), _ranges(0, size, shares), strict=True):
            added[owner] = added.get(owner, 0) + last - first
            for start, stop in _ranges(first, last, -(-(last - first) // MOST)):
                pieces.append(Piece(place, start, stop, owner, tuple(of_place)))
    return pieces


def _ranges(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges, as equal as they can be."""
    ends = [first + (last - first) * part // max(parts, 1) for part in range(max(parts, 1) + 1)]
    return list(itertools.pairwise(ends))


PART, LAST_PART, SUM = range(3)  # what a piece is: a rank's, a rank's that sends no more of it, the sum
KINDS = 3


class PushReduce:
    """Sums each parameter's gradient over the ranks of `push`; its `keepers`, global ranks, have the sum, others none.

    The gradient's pieces (`cut`) travel straight to their owners, each of which adds one up when it is there
    from every rank, and sends the sum to the other keepers. A rank sends (n - 1)/n of all bytes where each parameter
    has one keeper, and 2 (n - 1)/n where all ranks keep all: as many as a ring. There are neither buckets nor
    collectives, so that ranks need not have the same gradients, nor in the same order: an owner sums those that were
    sent until all have said that nothing more comes. Whatever arrives first, it adds in the order of ranks, and of one
    rank in the order in which it was sent: two runs have the same bits. 16-bit numbers are added in float32.
    `senders`: how many of the ranks have gradients; all of them, unless it is said.

    With `wire`, a dtype, gradients travel in it: each rank's is rounded to it once, its own part too, and so is the sum
    where it travels to other keepers. `errors` remembers what that loses, and gives it to the next gradient.
    """

    def __init__(
        self,
        push: Push,
        parameters: Sequence[paddle.Tensor],
        keepers: Sequence[Sequence[int]],
        *,
        senders: int | None = None,
        wire: str | None = None,
        errors: ErrorMemory | None = None,
    ):
        self._push, self._parameters, self._me = push, parameters, push.rank
        self._senders = len(push.ranks) if senders is None else senders
        self._keeps = [push.rank in ranks for ranks in keepers]
        self._dtypes = [dtype_of(parameter) for parameter in parameters]
        self._wires, self._errors = [wire or dtype for dtype in self._dtypes], errors
        self._pieces = cut([int(parameter.size) for parameter in parameters], keepers)
        self._of_place: dict[int, list[int]] = defaultdict(list)
        for number, piece in enumerate(self._pieces):
            self._of_place[piece.place].append(number)
        self._sums_travel = any(len(ranks) > 1 for ranks in keepers)
        self._begin()

    def _begin(self) -> None:
        self._held: dict[int, paddle.Tensor] = {}  # the memory of gradients that this rank keeps, by place
        # Of own pieces, by number and rank: what has been sent of it, and what after the last part.
        self._parts: dict[int, dict[int, Array]] = {}
        self._late: dict[int, dict[int, Array]] = {}
        self._whole: dict[int, set[int]] = defaultdict(set)  # the ranks that have sent all of a piece
        self._sums: dict[int, Array] = {}
        self._rounded: dict[int, Array] = {}  # what sums lost that have left, by number
        self._ended: set[int] = set()  # ranks that send no more parts
        self._done: set[int] = set()  # and no more sums

    @paddle.no_grad()
    def send(self, place: int, final: bool = False) -> None:
        """Sends a gradient, if there is one, which the parameter then has no more. `final`: it is not expected again
        before `finish`, so that its sum may be made."""
        parameter = self._parameters[place]
        if parameter.grad is None:
            return
        gradient = moved_gradient(parameter)
        self.send_bytes(place, self._to_be_sent(place, gradient), final)
        if self._keeps[place]:
            self._held.setdefault(place, gradient)
        self.take()

    def send_bytes(self, place: int, data: Array, final: bool) -> None:
        """Sends a gradient's bytes, in the dtype in which it travels; they must not be changed afterwards."""
        dtype = self._wires[place]
        width = data.nbytes // max(int(self._parameters[place].size), 1)
        for number in self._of_place[place]:
            piece = self._pieces[number]
            part = data[piece.start * width : piece.stop * width]
            if piece.owner == self._me:
                self._add(number, self._me, numbers_of(part, dtype), final)
            else:
                kind = LAST_PART if final else PART
                self._push.send_bytes(piece.owner, KINDS * number + kind, part)

    def _to_be_sent(self, place: int, gradient: paddle.Tensor) -> Array:
        """The bytes of a gradient that travel; of its numbers as they are, those in its own memory."""
        data, dtype, wire = bytes_of(gradient), self._dtypes[place], self._wires[place]
        if self._errors is None:
            if wire == dtype:
                return data
            numbers = numbers_of(data, dtype)
            roundings.note(self._parameters[place], numbers, wire)
            return bytes_from(numbers, wire)
        before, now = self._errors.of(place), self._errors.room(place)
        lost = _numbers_in(now)
        np.add(numbers_of(data, dtype), 0 if before is None else _numbers_in(before), out=lost)
        sent, clipped = narrowed(lost, wire)
        if clipped:
            self._errors.clipped.add(place)
        lost -= numbers_of(sent, wire)
        self._errors.lose(place, now)
        return sent

    def take(self) -> None:
        """Takes what has arrived."""
        for rank in self._push.others:
            while rank not in self._done and self._push.arrived(rank):
                self._take(rank)

    @paddle.no_grad()
    def finish(self) -> None:
        """After the last backward: sends what is left; then keepers have the sums, where any rank has a gradient, and
        others none. Collective."""
        for place in range(len(self._parameters)):
            self.send(place)
        self._end()
        with self._push.waiting("the exchange of gradients"):
            self._take_until(self._ended)
            for number in sorted(self._parts):
                self._add_up(number)
            for number in sorted(self._late):
                self._add_late(number)
            if self._sums_travel:
                self._end()
                self._take_until(self._done)
        self._remember_rounding()
        for place, gradient in sorted(self._held.items()):
            self._parameters[place]._copy_gradient_from(gradient)  # the same memory
        self._begin()

    def _end(self) -> None:
        for rank in self._push.others:
            self._push.end(rank)

    def _take_until(self, ranks: set[int]) -> None:
        """Waits for what the others send until all of them are among these `ranks`."""
        for rank in self._push.others:
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
            self._keep(number, np.frombuffer(data, np.uint8), self._wires[self._pieces[number].place])
        else:
            numbers = numbers_of(data, self._wires[self._pieces[number].place])
            self._add(number, rank, numbers, kind == LAST_PART)

    def _add(self, number: int, rank: int, numbers: Array, final: bool) -> None:
        """A rank's part of an own piece."""
        of_pieces = self._late if rank in self._whole[number] else self._parts
        parts = of_pieces.setdefault(number, {})
        if rank in parts:
            parts[rank] += numbers
        else:
            parts[rank] = numbers
        if final:
            self._whole[number].add(rank)
            if len(self._whole[number]) == self._senders and number in self._parts:
                self._add_up(number)

    def _add_up(self, number: int) -> None:
        """Adds the ranks' parts of an own piece in the order of ranks, and sends the sum to those who keep it."""
        parts = self._parts.pop(number)
        first, *others = [rank for rank in self._push.ranks if rank in parts]
        total = parts[first]
        if first == self._me:  # whose memory is overwritten when the sum has left: what is sent must stay
            total = np.add(total, parts[others[0]], out=parts[others.pop(0)]) if others else total.copy()
        for rank in others:
            total += parts[rank]
        self._give(number, total)

    def _add_late(self, number: int) -> None:
        """Adds what a rank has sent after its last part: it used the parameter more often than in the round before."""
        late = self._late[number]
        total = self._sums[number].copy()
        for rank in (rank for rank in self._push.ranks if rank in late):
            total += late[rank]
        self._give(number, total)

    def _give(self, number: int, total: Array) -> None:
        self._sums[number] = total
        piece = self._pieces[number]
        if piece.keepers == (self._me,):  # it does not travel, and so is not rounded for that
            dtype = self._dtypes[piece.place]
            self._keep(number, bytes_from(total, dtype), dtype)
            return
        dtype = self._wires[piece.place]
        if self._errors is None:
            data = bytes_from(total, dtype)
            roundings.note(self._parameters[piece.place], total, dtype)
        else:
            data, clipped = narrowed(total, dtype)
            if clipped:
                self._errors.clipped.add(piece.place)
            self._rounded[number] = total - numbers_of(data, dtype)
        for rank in piece.keepers:
            if rank != self._me:
                self._push.send_bytes(rank, KINDS * number + SUM, data)
        self._keep(number, data, dtype)

    def _remember_rounding(self) -> None:
        """What sums lost is an error of this rank, which rounded them."""
        for number, lost in self._rounded.items():
            piece = self._pieces[number]
            assert self._errors is not None
            _numbers_in(self._errors.opened(piece.place))[piece.start : piece.stop] += lost

    def _keep(self, number: int, data: Array, dtype: str) -> None:
        """Writes a sum, bytes of this dtype, into the memory of the gradient."""
        piece = self._pieces[number]
        if piece.place not in self._held:
            parameter = self._parameters[piece.place]
            self._held[piece.place] = paddle.empty(parameter.shape, parameter.dtype)
        held = self._held[piece.place]
        width, own = held.element_size(), self._dtypes[piece.place]
        bytes_of(held)[piece.start * width : piece.stop * width] = (
            data if own == dtype else bytes_from(numbers_of(data, dtype), own)
        )


def _numbers_in(tensor: paddle.Tensor) -> Array:
    """The numbers of a float32 or float64 tensor, where they lie."""
    return numbers_of(bytes_of(tensor), dtype_of(tensor))
