"""ZeRO-3 on accelerators: asynchronous collectives for parameters and gradients, in an order that all ranks agree on at
the beginning of a pass."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import paddle
import paddle.distributed as dist

from paddle_dp.axes.sharding.chunk import Chunk, Gathering, Reducing
from paddle_dp.axes.sharding.prefetch_trace import FetchList, PrefetchTrace
from paddle_dp.axes.sharding.rounds import NO_ORDER, OwnerRounds
from paddle_dp.core.hcg import Group
from paddle_dp.errors import UsageError
from paddle_dp.exchange.residuals import wide
from paddle_dp.exchange.roundings import roundings
from paddle_dp.tensors import as_dtype, dtype_of

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
    `comm_dtype`: the dtype in which gradients travel. Each rank's gradient is rounded to it once, the owner's too, and
    the owner adds in float32.
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
        comm_dtype: str | None = None,
    ):
        """`owners`: a rank of the group for each parameter; `fetches`: a second group of the same ranks."""
        self._group, self._fetches, self._parameters, self._owners = group, fetches, parameters, owners
        self._is_local = [owner == group.rank for owner in owners]
        self._prefetch, self._coupled, self._comm_dtype = prefetch, coupled, comm_dtype
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
        if self._comm_dtype is not None:
            roundings.note(self._parameters[index], gradient, self._comm_dtype)
            gradient = as_dtype(gradient, self._comm_dtype)
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
        return Reducing(self._chunk(indices), list(gradients), self._group, self._comm_dtype is not None)

    def _zeros(self, index: int) -> paddle.Tensor:
        """Stands for a gradient that this rank has not computed."""
        parameter = self._parameters[index]
        return paddle.zeros(parameter.shape, self._comm_dtype or parameter.dtype)

    @paddle.no_grad()
    def _settle(self) -> None:
        """Waits for the first chunk in flight: the device waits, not the host."""
        for index, total in self._reducing.popleft().sums():
            self._add(index, total)

    def _reduce_single(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        """The sum where only this rank has a gradient."""
        return gradient if self._comm_dtype is None else as_dtype(gradient, wide(self._parameters[index]))

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
        if self._comm_dtype is not None:
            for _, total in self._reduced_at_owners([index], [gradient]).sums():
                self._add(index, total)
            return
        dist.reduce(gradient, self._group.ranks[self._owners[index]], group=self._group)
        if self._is_local[index]:
            self._add(index, gradient)
