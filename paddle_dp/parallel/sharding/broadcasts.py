"""ZeRO-3 on accelerators: parameters and gradients by asynchronous collectives, in an order that all ranks have agreed
on at the beginning of a pass."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import paddle
import paddle.distributed as dist

from paddle_dp.errors import UsageError
from paddle_dp.parallel.exchange.error_memory import wide
from paddle_dp.parallel.exchange.memory import as_dtype, dtype_of
from paddle_dp.parallel.exchange.roundings import roundings
from paddle_dp.parallel.hcg import Group
from paddle_dp.parallel.sharding.chunk import Chunk, Gathering, Reducing
from paddle_dp.parallel.sharding.order import Need, Order
from paddle_dp.parallel.sharding.rounds import NO_ORDER, OwnerRounds

UNDER_WAY = 1  # chunks of gradients that are being reduced while the next one is computed


class Broadcasts:
    """Lends parameters by collectives, for which all ranks must be there, in one order.

    In the first round of a pass each rank offers the order of its last one. Where all offer the same, there are no more
    rounds until the end of the pass: each rank launches what the order says, parameters on a group of their own, so
    that they do not queue behind gradients. A rank that leaves the order launches the rest of it first, with zeros for
    the gradients that it has not computed; so the others come to the end as if it had followed. There it waits for
    them, and they serve it in rounds, as all ranks do that have no order in common.

    `ahead` 0: always in rounds. `coupled`: along another axis ranks with other samples' tokens wait for each other
    inside of layers, so that a rank that leaves could wait for ever for one that waits for it: it raises UsageError.
    `wire`: the dtype in which gradients travel: each is rounded to it once, its owner's own part too, and the owner
    adds them up in float32.
    """

    strict = True

    def __init__(  # noqa: PLR0913 - two groups, what they exchange, and how
        self,
        group: Group,
        fetches: Group,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        ahead: int,
        coupled: bool,
        wire: str | None = None,
    ):
        """`owners`: a rank of the group for each of the parameters; `fetches`: a second group of the same ranks."""
        self._group, self._fetches, self._parameters, self._owners = group, fetches, parameters, owners
        self._mine = [owner == group.rank for owner in owners]
        self._ahead, self._coupled, self._wire = ahead, coupled, wire
        self._rounds = OwnerRounds(group, parameters, self._mine, self._reduce, self._lend)
        self._wanted: frozenset[int] = frozenset()  # by this rank, in the round that begins now
        self._coming: defaultdict[int, deque[Callable[[], paddle.Tensor]]] = defaultdict(deque)
        self._fetching: list[Gathering] = []
        self._order: Order | None = None
        self._open: list[tuple[int, paddle.Tensor]] = []  # gradients of a chunk that is not complete
        self._reduced = 0  # gradients of the order that were put into chunks
        self._reducing: deque[Reducing] = deque()
        self._waiting: dict[int, paddle.Tensor] = {}  # by place: this rank's gradients that wait for a round
        self._totals: dict[int, paddle.Tensor] = {}  # by place: sums over all ranks, of what this rank owns
        self._computed: set[int] = set()  # what any rank has computed, of `_totals`

    def begin(self, order: Order | None, need: Need) -> bool:
        digest = NO_ORDER if order is None or not self._ahead else order.digest()
        if digest == NO_ORDER and not need:
            return False
        self._wanted = frozenset(need)
        agreed = self._rounds.agree(digest, need)
        self._wanted = frozenset()
        self._order, self._reduced = order if agreed else None, 0
        return agreed

    def fetch(self, places: Need) -> None:
        self._wanted = frozenset(places)
        self._rounds.fetch(places)
        self._wanted = frozenset()

    @paddle.no_grad()
    def _lend(self, place: int) -> None:
        """In a round: the owner's values; only ranks that want them keep them. Collective."""
        parameter = self._parameters[place]
        whole = parameter if self._mine[place] else paddle.empty(parameter.shape, parameter.dtype)
        dist.broadcast(whole, self._group.ranks[self._owners[place]], self._group)
        if place in self._wanted and not self._mine[place]:
            self._coming[place].append(lambda: whole)

    @paddle.no_grad()
    def ask(self, places: Need) -> None:
        gathering = Gathering(self._chunk(places), self._fetches)
        # The device has waited for those before: they were taken, or they are the owner's own.
        self._fetching = [*self._fetching[-self._ahead :], gathering]
        for place in places:
            if not self._mine[place]:
                self._coming[place].append(gathering.values.pop(place))

    def _chunk(self, places: Sequence[int]) -> Chunk:
        return Chunk(places, [self._parameters[p] for p in places], [self._owners[p] for p in places])

    @paddle.no_grad()
    def take(self, place: int) -> paddle.Tensor:
        return self._coming[place].popleft()()

    @paddle.no_grad()
    def gradient(self, place: int, follows: bool) -> None:
        self._rounds.computed(place)
        # Taken away at the owner, too: backward may add to it again before the reduce is done. (A view keeps memory.)
        own = self._parameters[place].grad
        gradient = own.view(own.shape)
        if self._wire is not None:
            roundings.note(self._parameters[place], gradient, self._wire)
            gradient = as_dtype(gradient, self._wire)
        self._parameters[place].clear_gradient(False)
        if follows:
            self._put(place, gradient, UNDER_WAY)
            return
        if place in self._waiting:  # each is reduced for itself, or bits would depend on how ranks agree
            self._rounds.flush()
            if place in self._waiting:  # no other rank had one
                self._add(place, self._alone(place, self._waiting.pop(place)))
        self._waiting[place] = gradient
        self._rounds.gradient(place)

    def _put(self, place: int, gradient: paddle.Tensor, under_way: float) -> None:
        """Puts the next gradient of the order into its chunk, and launches a chunk that is complete, once there are
        fewer than so many under way."""
        assert self._order is not None
        self._open.append((place, gradient))
        number, numbers = self._reduced, self._order.gradient_chunks
        self._reduced += 1
        if self._reduced < len(numbers) and numbers[self._reduced] == numbers[number]:
            return
        while len(self._reducing) >= under_way:
            self._settle()
        places, gradients = zip(*self._open, strict=True)
        self._open = []
        self._reducing.append(self._reduced_at_owners(places, gradients))

    def _reduced_at_owners(self, places: Sequence[int], gradients: Sequence[paddle.Tensor]) -> Reducing:
        return Reducing(self._chunk(places), list(gradients), self._group, self._wire is not None)

    def _zeros(self, place: int) -> paddle.Tensor:
        """For a gradient that this rank has not computed."""
        parameter = self._parameters[place]
        return paddle.zeros(parameter.shape, self._wire or parameter.dtype)

    @paddle.no_grad()
    def _settle(self) -> None:
        """Waits for the first of the chunks that are being reduced: the device, not the host."""
        for place, total in self._reducing.popleft().sums():
            self._add(place, total)

    def _alone(self, place: int, gradient: paddle.Tensor) -> paddle.Tensor:
        """A sum of one rank's gradient."""
        return gradient if self._wire is None else as_dtype(gradient, wide(self._parameters[place]))

    def _add(self, place: int, total: paddle.Tensor) -> None:
        """Adds a sum over all ranks to those of the micro-batches before."""
        self._totals[place] = self._totals[place] + total if place in self._totals else total

    @paddle.no_grad()
    def leave(self, order: Order, asked: int, gradients: int, midway: bool) -> None:
        if midway and self._coupled:
            raise UsageError(
                "strategy: a rank left the order in which it had run its layers before, in the midst of a forward or "
                "backward, as where a gate chooses among experts. Together with the sequence axis the parameters of "
                "sharding_stage 3 cannot be fetched ahead then: set strategy.prefetch=0."
            )
        # Nothing here waits for what is launched here: until the last launch, the others may stand still where they
        # wait for this rank.
        while asked < len(order.needs):
            chunk = list(order.chunk(asked))
            places = [place for number in chunk for place in order.travels[number]]
            if places:
                self._fetching.append(Gathering(self._chunk(places), self._fetches))
            asked = chunk[-1] + 1
        for place in order.gradients[gradients:]:
            self._put(place, self._zeros(place), math.inf)
        self._order = None

    @paddle.no_grad()
    def finish(self) -> None:
        self.meet()
        for place, total in self._totals.items():
            if place in self._computed:  # else it is zeros of ranks that left an order: no update
                before, dtype = self._parameters[place].grad, dtype_of(self._parameters[place])
                total = as_dtype(total, dtype)
                self._parameters[place]._copy_gradient_from(total if before is None else total + before)
        self._totals, self._computed = {}, set()

    @paddle.no_grad()
    def meet(self) -> None:
        while self._reducing:
            self._settle()
        for gathering in self._fetching:
            gathering.wait()  # until then the owners' parameters are read
        self._fetching = []
        self._computed |= self._rounds.finish()
        for place, gradient in self._waiting.items():  # an owner's, of which no other rank had one
            self._add(place, self._alone(place, gradient))
        self._waiting = {}

    @paddle.no_grad()
    def _reduce(self, place: int) -> None:
        """In a round: sums a gradient at its owner and frees it elsewhere; a rank that has none adds zeros."""
        gradient = self._waiting.pop(place, None)
        if gradient is None:
            gradient = self._zeros(place)
        if self._wire is not None:
            for _, total in self._reduced_at_owners([place], [gradient]).sums():
                self._add(place, total)
            return
        dist.reduce(gradient, self._group.ranks[self._owners[place]], group=self._group)
        if self._mine[place]:
            self._add(place, gradient)
