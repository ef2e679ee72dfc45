"""A chunk of parameters with one owner each: sends its values to all ranks, or its gradients to the owners, on an
accelerator, in one collective where that is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.core.hcg import Group
from paddle_dp.exchange.residuals import wide
from paddle_dp.tensors import as_dtype


class Chunk:
    """Parameters with their indices, and the rank of the group that owns each."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self.indices, self.parameters, self.owners = indices, parameters, owners

    def owned(self, rank: int) -> list[int]:
        """The parameters that a rank owns, as positions within the chunk."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def size(self, rank: int) -> int:
        """The number of elements that a rank owns."""
        return sum(int(self.parameters[index].size) for index in self.owned(rank))

    def exchanges(self, ranks: int) -> bool:
        """Whether one all-to-all uses the links no longer than a collective per owner.

        Time on a link: (ranks - 1) × the largest share, with both directions in use, against the sum of all shares.
        """
        sizes = [self.size(rank) for rank in range(ranks)]
        one_kind = len({parameter.dtype for parameter in self.parameters}) == 1
        return one_kind and all(sizes) and (ranks - 1) * max(sizes) <= sum(sizes)


class Gathering:
    """Sends a chunk's values to all ranks. Collective, also if the values are not used.

    `values`: by index of another owner's parameter, a function that makes the device wait and returns its values.
    """

    def __init__(self, chunk: Chunk, group: Group):
        self.values: dict[int, Callable[[], paddle.Tensor]] = {}
        self.pending: list[Any] = []  # tasks, and the memory that they read
        if chunk.exchanges(group.nranks):
            self._exchange(chunk, group)
        else:
            self._broadcast_each(chunk, group)

    def wait(self) -> None:
        """Makes the device wait, not the host, until this rank's parameters have been read."""
        for task, _ in self.pending:
            task.wait()
        self.pending = []

    def _exchange(self, chunk: Chunk, group: Group) -> None:
        me, sizes = group.rank, [chunk.size(rank) for rank in range(group.nranks)]
        values = [chunk.parameters[index].reshape([-1]) for index in chunk.owned(me)]
        copies = paddle.concat(values * (group.nranks - 1))
        out = paddle.empty([sum(sizes) - sizes[me]], copies.dtype)
        task = dist.alltoall_single(
            out,
            copies,
            [0 if rank == me else sizes[me] for rank in range(group.nranks)],
            [0 if rank == me else size for rank, size in enumerate(sizes)],
            group,
            sync_op=False,
        )
        self.pending.append((task, copies))
        at = 0
        for rank in range(group.nranks):
            for index in chunk.owned(rank) if rank != me else []:
                parameter = chunk.parameters[index]
                size = int(parameter.size)
                self.values[chunk.indices[index]] = partial(self._slice, out, at, size, parameter.shape)
                at += size

    def _slice(self, full: paddle.Tensor, start: int, size: int, shape: Sequence[int]) -> paddle.Tensor:
        self.wait()  # at the chunk's first value: the sent copies can be freed
        return full[start : start + size].view(shape)

    def _broadcast_each(self, chunk: Chunk, group: Group) -> None:
        for index, parameter, owner in zip(chunk.indices, chunk.parameters, chunk.owners, strict=True):
            is_local = owner == group.rank
            full = parameter if is_local else paddle.empty(parameter.shape, parameter.dtype)
            task = dist.broadcast(full, group.ranks[owner], group, sync_op=False)
            self.pending.append((task, full))
            if not is_local:
                self.values[index] = partial(_wait, task, full)


class Reducing:
    """Sends a chunk's gradients to their owners. Collective.

    `rounded`: the gradients are in a communication dtype. The owners add them up in float32, for any split of the
    chunk; a collective would add in that dtype. If one owner has the whole chunk, it receives all ranks' gradients.
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
        peers = [rank for rank in range(group.nranks) if rank != me]
        gathered = [flat[index] for rank in peers for index in chunk.owned(rank)]
        self._sent = paddle.concat(gathered) if gathered else paddle.empty([0], flat[0].dtype)
        self._gradients = [self._gradients[index] for index in chunk.owned(me)]
        size = chunk.size(me)
        self._rows = paddle.empty([len(peers) * size], self._sent.dtype)
        return dist.alltoall_single(
            self._rows,
            self._sent,
            [0 if rank == me else chunk.size(rank) for rank in range(group.nranks)],
            [0 if rank == me else size for rank in range(group.nranks)],
            group,
            sync_op=False,
        )

    def sums(self) -> Iterator[tuple[int, paddle.Tensor]]:
        """Yields the index and sum of each gradient that this rank owns, after the device has waited for them. It adds
        in the order of ranks, independently of the chunk's other gradients."""
        for task in self._tasks:
            task.wait()
        positions = self._chunk.owned(self._group.rank)
        indices = [self._chunk.indices[position] for position in positions]
        if self._rows is None:
            yield from zip(indices, (self._gradients[position] for position in positions), strict=True)
            return
        size, at = self._chunk.size(self._group.rank), 0
        for index, gradient in zip(indices, self._gradients, strict=True):
            starts = range(at, int(self._rows.size), size)
            terms = [self._rows[start : start + int(gradient.size)].view(gradient.shape) for start in starts]
            terms.insert(self._group.rank, gradient)
            if self._rounded:
                terms = [as_dtype(term, self._wide(index)) for term in terms]
            total = terms[0] + terms[1]  # in new memory: the chunk's is freed
            for term in terms[2:]:
                total.add_(term)
            yield index, total
            at += int(gradient.size)

    def _wide(self, index: int) -> str:
        return wide(self._chunk.parameters[self._chunk.indices.index(index)])


def _wait(task: Any, full: paddle.Tensor) -> paddle.Tensor:
    task.wait()
    return full
