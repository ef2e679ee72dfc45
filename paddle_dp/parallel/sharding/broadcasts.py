"""ZeRO-3 on accelerators: parameters by asynchronous broadcasts, gradients by asynchronous reduces, in an order that
all ranks have agreed on at the beginning of a pass."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.errors import UsageError
from paddle_dp.parallel.hcg import Group
from paddle_dp.parallel.sharding.order import Need, Order
from paddle_dp.parallel.sharding.rounds import NO_ORDER, OwnerRounds, size_of


class Broadcasts:
    """Lends parameters by collectives, for which all ranks must be there, in one order.

    In the first round of a pass each rank offers the order of its last one. Where all offer the same, there are no more
    rounds until the end of the pass: each rank launches what the order says, parameters on a group of their own, so
    that they do not queue behind gradients. A rank that leaves the order launches the rest of it first, with zeros for
    the gradients that it has not computed; so the others come to the end as if it had followed. There it waits for
    them, and they serve it in rounds, as all ranks do that have no order in common.

    `ahead` 0: always in rounds. `coupled`: along another axis ranks with other samples' tokens wait for each other
    inside of layers, so that a rank that leaves could wait for ever for one that waits for it: it raises UsageError.
    """

    strict = True

    def __init__(
        self,
        group: Group,
        fetches: Group,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        ahead: int,
        coupled: bool,
    ):
        """`owners`: a rank of the group for each of the parameters; `fetches`: a second group of the same ranks."""
        self._group, self._fetches, self._parameters, self._owners = group, fetches, parameters, owners
        self._mine = [owner == group.rank for owner in owners]
        self._ahead, self._coupled = ahead, coupled
        self._rounds = OwnerRounds(group, parameters, self._mine, self._reduce, self._lend)
        self._wanted: frozenset[int] = frozenset()  # by this rank, in the round that begins now
        self._coming: defaultdict[int, deque[tuple[paddle.Tensor, Any]]] = defaultdict(deque)
        self._last: Any = None  # the task of the last broadcast
        self._hollow: set[int] = set()  # own gradients that were begun with zeros
        self._reduces: deque[tuple[int, paddle.Tensor, Any]] = deque()
        self._reduced_bytes = 0  # of gradients that are being reduced
        self._sizes = [size_of(parameter) for parameter in parameters]
        self._most_reduced = 2 * max(self._sizes)

    def begin(self, order: Order | None, need: Need) -> bool:
        digest = NO_ORDER if order is None or not self._ahead else order.digest()
        if digest == NO_ORDER and not need:
            return False
        self._wanted = frozenset(need)
        agreed = self._rounds.agree(digest, need)
        self._wanted = frozenset()
        return agreed

    def fetch(self, places: Need) -> None:
        self._wanted = frozenset(places)
        self._rounds.fetch(places)
        self._wanted = frozenset()

    @paddle.no_grad()
    def _lend(self, place: int) -> None:
        """In a round: the owner's values; only ranks that want them keep them. Collective."""
        whole, _ = self._launch(place, self._group, sync=True)
        if place in self._wanted and not self._mine[place]:
            self._coming[place].append((whole, None))

    @paddle.no_grad()
    def ask(self, places: Need) -> None:
        for place in places:
            whole, self._last = self._launch(place, self._fetches, sync=False)
            if not self._mine[place]:
                self._coming[place].append((whole, self._last))

    def _launch(
        self, place: int, group: Group, sync: bool, into: paddle.Tensor | None = None
    ) -> tuple[paddle.Tensor, Any]:
        parameter = self._parameters[place]
        whole = into
        if self._mine[place]:
            whole = parameter
        elif whole is None:
            whole = paddle.empty(parameter.shape, parameter.dtype)
        return whole, dist.broadcast(whole, group.ranks[self._owners[place]], group, sync_op=sync)

    def take(self, place: int) -> paddle.Tensor:
        whole, task = self._coming[place].popleft()
        if task is not None:
            task.wait()  # the device, not the host
        return whole

    @paddle.no_grad()
    def gradient(self, place: int, follows: bool) -> None:
        self._rounds.computed(place)
        if not follows:
            self._rounds.gradient(place)
            return
        # Taken away at the owner, too: backward may add to it again before the reduce is done. (A view keeps memory.)
        own = self._parameters[place].grad
        gradient = own.view(own.shape)
        self._parameters[place].clear_gradient(False)
        self._launch_reduce(place, gradient)
        while self._reduced_bytes > self._most_reduced:
            self._settle()

    def _launch_reduce(self, place: int, gradient: paddle.Tensor) -> None:
        task = dist.reduce(gradient, self._group.ranks[self._owners[place]], group=self._group, sync_op=False)
        self._reduces.append((place, gradient, task))
        self._reduced_bytes += self._sizes[place]

    @paddle.no_grad()
    def _settle(self) -> None:
        """Waits for the first of the reduces under way: the device, not the host."""
        place, gradient, task = self._reduces.popleft()
        task.wait()
        self._reduced_bytes -= self._sizes[place]
        if self._mine[place]:
            parameter = self._parameters[place]
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    @paddle.no_grad()
    def leave(self, order: Order, asked: int, gradients: int, midway: bool) -> None:
        if midway and self._coupled:
            raise UsageError(
                "strategy: a rank left the order in which it had run its layers before, in the midst of a forward or "
                "backward, as where a gate chooses among experts. Together with the sequence axis the parameters of "
                "sharding_stage 3 cannot be fetched ahead then: set strategy.prefetch=0."
            )
        places = [place for need in order.travels[asked:] for place in need]
        sums = order.gradients[gradients:]
        # Everything is made before the first launch: until the last one, the others may stand still where they wait
        # for this rank, and what this device still waits for comes from them.
        unread = self._scratch([place for place in places if not self._mine[place]], zero=False)
        nothing = self._scratch([place for place in sums if not self._mine[place]], zero=True)
        self._hollow |= {
            place for place in sums if self._mine[place] and self._parameters[place].grad is None
        }
        own = [paddle.zeros_like(self._parameters[place]) for place in sums if self._mine[place]]
        for place in places:
            _, self._last = self._launch(place, self._fetches, sync=False, into=unread.get(place))
        for place in sums:
            self._launch_reduce(place, own.pop(0) if self._mine[place] else nothing[place])

    def _scratch(self, places: Sequence[int], zero: bool) -> dict[int, paddle.Tensor]:
        """Tensors in one memory for parameters that nobody reads, and for gradients of which there are none."""
        kinds = {p.dtype for p in (self._parameters[place] for place in places)}
        sizes = {
            kind: [int(self._parameters[p].size) for p in places if self._parameters[p].dtype == kind]
            for kind in kinds
        }
        make = paddle.zeros if zero else paddle.empty
        whole = {kind: make([max(of_kind)], kind) for kind, of_kind in sizes.items()}
        views = {(kind, size): whole[kind][:size] for kind in kinds for size in set(sizes[kind])}
        return {p: views[self._parameters[p].dtype, int(self._parameters[p].size)] for p in places}

    def finish(self) -> None:
        while self._reduces:
            self._settle()
        if self._last is not None:
            self._last.wait()  # until then the owner's parameters are read
            self._last = None
        computed = self._rounds.finish()
        for place in self._hollow - computed:  # nobody has one: then nothing is updated
            self._parameters[place].clear_gradient(False)
        self._hollow.clear()

    meet = finish

    @paddle.no_grad()
    def _reduce(self, place: int) -> None:
        """In a round: sums a gradient at its owner and frees it elsewhere; a rank that has none adds zeros. The owner's
        contains the earlier micro-batches; the others' were freed after each."""
        parameter = self._parameters[place]
        if parameter.grad is None:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
        dist.reduce(parameter.grad, self._group.ranks[self._owners[place]], group=self._group)
        if not self._mine[place]:
            parameter.clear_gradient(False)
