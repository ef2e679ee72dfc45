"""ZeRO-3 on accelerators: asynchronous collectives for parameters and gradients, in an order that all ranks agree on at
the beginning of a pass."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.axes.sharding.prefetch_trace import FetchList, PrefetchTrace
from paddle_dp.axes.sharding.rounds import NO_ORDER, OwnerRounds
from paddle_dp.core.data_group import Group
from paddle_dp.errors import UsageError
from paddle_dp.exchange.roundings import roundings
from paddle_dp.tensors import as_dtype, dtype_of, wide

# A chunk of parameters with one owner each: sends its values to all ranks, or its gradients to the owners, on an ------


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


MAX_REDUCES_IN_FLIGHT = 1  # chunks of gradients that are being reduced while the next one is computed


class Broadcasts:
    """Provides parameters by collectives, which all ranks must enter in one order.

    In the first round of a pass each rank offers the digest of its recorded order. If all agree, each rank launches
    collectives in that order, without rounds, until the pass ends; parameters have a separate group so that they do not
    queue after gradients. A rank that leaves the order first launches the remaining collectives, with zeros for
    gradients that it has not computed, so that the others reach the end of the pass. There they serve it in rounds, as
    ranks without a common order do.

    `prefetch=0`: always in rounds. `coupled`: on another axis, ranks with tokens of other samples wait for each other
    within layers; a rank that leaves the order could deadlock with one that waits for it, so it raises UsageError.
    `reduce_dtype`: the dtype in which gradients travel. Each rank's gradient is rounded to it once, the owner's too,
    and the owner adds in float32.
    """

    strict = True

    def __init__(  # noqa: PLR0913 - two groups, parameters, and options
        self,
        group: Group,
        fetches: Group,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        prefetch: int,
        coupled: bool,
        reduce_dtype: str | None = None,
    ):
        """`owners`: a rank of the group for each parameter; `fetches`: a second group of the same ranks."""
        self._group, self._fetches, self._parameters, self._owners = group, fetches, parameters, owners
        self._is_local = [owner == group.rank for owner in owners]
        self._prefetch, self._coupled, self._reduce_dtype = prefetch, coupled, reduce_dtype
        self._rounds = OwnerRounds(group, parameters, self._is_local, self._reduce, self._broadcast)
        self._requested: frozenset[int] = frozenset()  # by this rank, in the current round
        self._coming: defaultdict[int, deque[Callable[[], paddle.Tensor]]] = defaultdict(deque)
        self._fetching: list[Gathering] = []
        self._order: PrefetchTrace | None = None
        self._open: list[tuple[int, paddle.Tensor]] = []  # gradients of the incomplete chunk
        self._reduced = 0  # number of the order's gradients in chunks
        self._reducing: deque[Reducing] = deque()
        self._waiting: dict[int, paddle.Tensor] = {}  # by index: this rank's gradients that wait for a round
        self._totals: dict[int, paddle.Tensor] = {}  # by index: sums over all ranks of owned gradients
        self._computed: set[int] = set()  # indices in `_totals` that any rank has computed

    def begin(self, order: PrefetchTrace | None, need: FetchList) -> bool:
        digest = NO_ORDER if order is None or not self._prefetch else order.digest()
        if digest == NO_ORDER and not need:
            return False
        self._requested = frozenset(need)
        agreed = self._rounds.agree(digest, need)
        self._requested = frozenset()
        self._order, self._reduced = order if agreed else None, 0
        return agreed

    def fetch(self, indices: FetchList) -> None:
        self._requested = frozenset(indices)
        self._rounds.fetch(indices)
        self._requested = frozenset()

    @paddle.no_grad()
    def _broadcast(self, index: int) -> None:
        """Serves a round with the owner's values; only ranks that requested them keep them. Collective."""
        parameter = self._parameters[index]
        values = parameter if self._is_local[index] else paddle.empty(parameter.shape, parameter.dtype)
        dist.broadcast(values, self._group.ranks[self._owners[index]], self._group)
        if index in self._requested and not self._is_local[index]:
            self._coming[index].append(lambda: values)

    @paddle.no_grad()
    def ask(self, indices: FetchList) -> None:
        gathering = Gathering(self._chunk(indices), self._fetches)
        # The device has waited for earlier ones: they were taken, or this rank owns them.
        self._fetching = [*self._fetching[-self._prefetch :], gathering]
        for index in indices:
            if not self._is_local[index]:
                self._coming[index].append(gathering.values.pop(index))

    def _chunk(self, indices: Sequence[int]) -> Chunk:
        return Chunk(indices, [self._parameters[p] for p in indices], [self._owners[p] for p in indices])

    @paddle.no_grad()
    def take(self, index: int) -> paddle.Tensor:
        return self._coming[index].popleft()()

    @paddle.no_grad()
    def gradient(self, index: int, follows: bool) -> None:
        self._rounds.computed(index)
        # Removed at the owner, too: backward may add to it before the reduce is done. (A view keeps the memory.)
        computed = self._parameters[index].grad
        gradient = computed.view(computed.shape)
        if self._reduce_dtype is not None:
            roundings.note(self._parameters[index], gradient, self._reduce_dtype)
            gradient = as_dtype(gradient, self._reduce_dtype)
        self._parameters[index].clear_gradient(False)
        if follows:
            self._put(index, gradient, MAX_REDUCES_IN_FLIGHT)
            return
        if index in self._waiting:  # reduced separately, or bits would depend on how ranks agree
            self._rounds.flush()
            if index in self._waiting:  # no other rank had one
                self._add(index, self._reduce_single(index, self._waiting.pop(index)))
        self._waiting[index] = gradient
        self._rounds.gradient(index)

    def _put(self, index: int, gradient: paddle.Tensor, under_way: float) -> None:
        """Adds the next gradient of the order to its chunk. Launches a complete chunk once fewer than `under_way` are
        in flight."""
        assert self._order is not None
        self._open.append((index, gradient))
        number, numbers = self._reduced, self._order.gradient_chunks
        self._reduced += 1
        if self._reduced < len(numbers) and numbers[self._reduced] == numbers[number]:
            return
        while len(self._reducing) >= under_way:
            self._settle()
        indices, gradients = zip(*self._open, strict=True)
        self._open = []
        self._reducing.append(self._reduced_at_owners(indices, gradients))

    def _reduced_at_owners(self, indices: Sequence[int], gradients: Sequence[paddle.Tensor]) -> Reducing:
        return Reducing(self._chunk(indices), list(gradients), self._group, self._reduce_dtype is not None)

    def _zeros(self, index: int) -> paddle.Tensor:
        """Stands for a gradient that this rank has not computed."""
        parameter = self._parameters[index]
        return paddle.zeros(parameter.shape, self._reduce_dtype or parameter.dtype)

    @paddle.no_grad()
    def _settle(self) -> None:
        """Waits for the first chunk in flight: the device waits, not the host."""
        for index, total in self._reducing.popleft().sums():
            self._add(index, total)

    def _reduce_single(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        """The sum where only this rank has a gradient."""
        return gradient if self._reduce_dtype is None else as_dtype(gradient, wide(self._parameters[index]))

    def _add(self, index: int, total: paddle.Tensor) -> None:
        """Adds a sum over all ranks to the sums of earlier micro-batches."""
        self._totals[index] = self._totals[index] + total if index in self._totals else total

    @paddle.no_grad()
    def abandon(self, order: PrefetchTrace, requested: int, gradients: int, midway: bool) -> None:
        if midway and self._coupled:
            raise UsageError(
                "strategy: a rank left the order in which it had run its layers before, within a forward or "
                "backward, as where a gate chooses among experts. Together with the sequence axis the parameters of "
                "sharding_stage 3 cannot be prefetched then: set strategy.prefetch=0."
            )
        # Do not wait here for a launched collective: until the last launch the others may be blocked on this rank.
        while requested < len(order.needs):
            chunk = list(order.chunk(requested))
            indices = [index for number in chunk for index in order.travels[number]]
            if indices:
                self._fetching.append(Gathering(self._chunk(indices), self._fetches))
            requested = chunk[-1] + 1
        for index in order.gradients[gradients:]:
            self._put(index, self._zeros(index), math.inf)
        self._order = None

    @paddle.no_grad()
    def finish(self) -> None:
        self.meet()
        for index, total in self._totals.items():
            if index in self._computed:  # else it is zeros from ranks that left an order: no update
                before, dtype = self._parameters[index].grad, dtype_of(self._parameters[index])
                total = as_dtype(total, dtype)
                self._parameters[index]._copy_gradient_from(total if before is None else total + before)
        self._totals, self._computed = {}, set()

    @paddle.no_grad()
    def meet(self) -> None:
        while self._reducing:
            self._settle()
        for gathering in self._fetching:
            gathering.wait()  # until then the collective reads the owners' parameters
        self._fetching = []
        self._computed |= self._rounds.finish()
        for index, gradient in self._waiting.items():  # owned gradients that no other rank had
            self._add(index, self._reduce_single(index, gradient))
        self._waiting = {}

    @paddle.no_grad()
    def _reduce(self, index: int) -> None:
        """Serves a round: sums a gradient at its owner and frees it elsewhere. A rank without one adds zeros."""
        gradient = self._waiting.pop(index, None)
        if gradient is None:
            gradient = self._zeros(index)
        if self._reduce_dtype is not None:
            for _, total in self._reduced_at_owners([index], [gradient]).sums():
                self._add(index, total)
            return
        dist.reduce(gradient, self._group.ranks[self._owners[index]], group=self._group)
        if self._is_local[index]:
            self._add(index, gradient)
