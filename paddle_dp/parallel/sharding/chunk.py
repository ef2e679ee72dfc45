"""One chunk of parameters with one owner each: its values to all ranks, or its gradients to the owners, on an
accelerator, in one collective where that is the shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.parallel.exchange.error_memory import wide
from paddle_dp.parallel.exchange.memory import as_dtype
from paddle_dp.parallel.hcg import Group


class Chunk:
    """Parameters, by their places, and the rank of the group that owns each."""

    def __init__(self, places: Sequence[int], parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self.places, self.parameters, self.owners = places, parameters, owners

    def of(self, rank: int) -> list[int]:
        """Which of the parameters a rank owns: their indices in the chunk."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def size(self, rank: int) -> int:
        """The number of elements that a rank owns."""
        return sum(int(self.parameters[index].size) for index in self.of(rank))

    def exchanges(self, ranks: int) -> bool:
        """Whether an exchange of all with all takes the links no longer than one owner after the other: on each link
        (ranks - 1) times the largest share, in one direction while the other is used as well, against all of it."""
        sizes = [self.size(rank) for rank in range(ranks)]
        one_kind = len({parameter.dtype for parameter in self.parameters}) == 1
        return one_kind and all(sizes) and (ranks - 1) * max(sizes) <= sum(sizes)


class Gathering:
    """A chunk's values on their way to all ranks. `values`: by place, what waits for those of another owner, on the
    device, and returns them. Collective, also without a use for the values."""

    def __init__(self, chunk: Chunk, group: Group):
        self.values: dict[int, Callable[[], paddle.Tensor]] = {}
        self.kept: list[Any] = []  # tasks, and memory that is read until they are done
        if chunk.exchanges(group.nranks):
            self._exchange(chunk, group)
        else:
            self._one_by_one(chunk, group)

    def wait(self) -> None:
        """The device, not the host, until the owner's own parameters are read."""
        for task, _ in self.kept:
            task.wait()
        self.kept = []

    def _exchange(self, chunk: Chunk, group: Group) -> None:
        me, sizes = group.rank, [chunk.size(rank) for rank in range(group.nranks)]
        own = [chunk.parameters[index].reshape([-1]) for index in chunk.of(me)]
        given = paddle.concat(own * (group.nranks - 1))
        out = paddle.empty([sum(sizes) - sizes[me]], given.dtype)
        task = dist.alltoall_single(
            out,
            given,
            [0 if rank == me else sizes[me] for rank in range(group.nranks)],
            [0 if rank == me else size for rank, size in enumerate(sizes)],
            group,
            sync_op=False,
        )
        self.kept.append((task, given))
        at = 0
        for rank in range(group.nranks):
            for index in chunk.of(rank) if rank != me else []:
                parameter = chunk.parameters[index]
                size = int(parameter.size)
                self.values[chunk.places[index]] = partial(self._part, out, at, size, parameter.shape)
                at += size

    def _part(self, whole: paddle.Tensor, start: int, size: int, shape: Sequence[int]) -> paddle.Tensor:
        self.wait()  # at the chunk's first value: the copies that were sent go then
        return whole[start : start + size].view(shape)

    def _one_by_one(self, chunk: Chunk, group: Group) -> None:
        for place, parameter, owner in zip(chunk.places, chunk.parameters, chunk.owners, strict=True):
            mine = owner == group.rank
            whole = parameter if mine else paddle.empty(parameter.shape, parameter.dtype)
            task = dist.broadcast(whole, group.ranks[owner], group, sync_op=False)
            self.kept.append((task, whole))
            if not mine:
                self.values[place] = partial(_whole, task, whole)


class Reducing:
    """A chunk's gradients on their way to their owners. Collective.

    `rounded`: they are in a dtype to travel in, and their owners add them up in float32, however the chunk is shared:
    a collective would add in that dtype. Where one owner has all of it, as many bytes come to it as all others send.
    """

    def __init__(self, chunk: Chunk, gradients: list[paddle.Tensor], group: Group, rounded: bool = False):
        self._chunk, self._gradients, self._group = chunk, gradients, group
        self._rows: paddle.Tensor | None = None  # the other ranks' gradients of this rank's parameters
        self._rounded = rounded
        if rounded or chunk.exchanges(group.nranks):
            self._tasks = [self._exchange()]
        else:
            self._tasks = [
                dist.reduce(gradient, group.ranks[owner], group=group, sync_op=False)
                for gradient, owner in zip(gradients, chunk.owners, strict=True)
            ]

    def _exchange(self) -> Any:
        chunk, group, me = self._chunk, self._group, self._group.rank
        flat = [gradient.reshape([-1]) for gradient in self._gradients]
        others = [rank for rank in range(group.nranks) if rank != me]
        given = [flat[index] for rank in others for index in chunk.of(rank)]
        self._given = paddle.concat(given) if given else paddle.empty([0], flat[0].dtype)
        self._gradients = [self._gradients[index] for index in chunk.of(me)]
        size = chunk.size(me)
        self._rows = paddle.empty([len(others) * size], self._given.dtype)
        return dist.alltoall_single(
            self._rows,
            self._given,
            [0 if rank == me else chunk.size(rank) for rank in range(group.nranks)],
            [0 if rank == me else size for rank in range(group.nranks)],
            group,
            sync_op=False,
        )

    def sums(self) -> Iterator[tuple[int, paddle.Tensor]]:
        """The place and the sum of each gradient of this rank's, once the device has waited for them. Sums are in the
        order of ranks, whatever else is in the chunk."""
        for task in self._tasks:
            task.wait()
        places = [self._chunk.places[index] for index in self._chunk.of(self._group.rank)]
        if self._rows is None:
            mine = self._chunk.of(self._group.rank)
            yield from zip(places, (self._gradients[index] for index in mine), strict=True)
            return
        size, at = self._chunk.size(self._group.rank), 0
        for place, own in zip(places, self._gradients, strict=True):
            starts = range(at, int(self._rows.size), size)
            parts = [self._rows[start : start + int(own.size)].view(own.shape) for start in starts]
            parts.insert(self._group.rank, own)
            if self._rounded:
                parts = [as_dtype(part, self._wide(place)) for part in parts]
            total = parts[0] + parts[1]  # of memory of its own: the chunk's goes
            for part in parts[2:]:
                total.add_(part)
            yield place, total
            at += int(own.size)

    def _wide(self, place: int) -> str:
        return wide(self._chunk.parameters[self._chunk.places.index(place)])


def _whole(task: Any, whole: paddle.Tensor) -> paddle.Tensor:
    task.wait()
    return whole
