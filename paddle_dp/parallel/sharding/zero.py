"""Sharding: along one axis of ranks that read different samples, each parameter's update has one owner.

ZeRO (Rajbhandari et al., arXiv:1910.02054): stage 1 keeps the optimizer's states with the owner only, stage 2 the
gradients too, stage 3 the parameters too. Who owns what is fleet's decision, and so are the groups; why stages 2 and 3
are not fleet's own, docs/decisions/0008 says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import DygraphShardingOptimizer

from paddle_dp.errors import UsageError
from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.sharding.offload import Offload
from paddle_dp.parallel.sharding.rounds import Rounds
from paddle_dp.parallel.sharding.stage3 import Stage3


class Zero:
    """Deals a placed model's parameters to the ranks of the sharding axis, whole, and keeps their updates there.

    Every trainable parameter gets an owner, a rank of the axis, which is written into `placements`; from now on
    `optimizer` knows only those that are this rank's. Collective. Raises UsageError where a rank would own nothing.
    """

    def __init__(
        self,
        model: nn.Layer,
        optimizer: Any,
        hcg: HCG,
        placements: Placements,
        stage: int,
        offload: bool = False,
    ):
        self.group, self.stage = hcg.get_sharding_parallel_group(), stage
        # Of fleet's own sharding optimizer, the dealing: its step refuses a parameter with a regularizer.
        dealt = DygraphShardingOptimizer(optimizer, hcg)._rank2params
        self._owner = {id(p): owner for owner, parameters in dealt.items() for p in parameters}
        if not all(dealt.values()):
            raise UsageError(
                f"strategy.sharding={self.group.nranks}, but there are only {len(self._owner)} parameters: some ranks "
                "would own none. Set a smaller strategy.sharding or strategy.pipeline."
            )
        self.parameters = [p for p in model.parameters() if id(p) in self._owner]
        for parameter in self.parameters:
            placements.record(parameter, owner=self.owner(parameter), stored_by_owner=stage == 3)
        self._rounds = Rounds(self.group, 2 * len(self.parameters), self._serve)
        self._places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._ready: list[int] = []  # places of gradients that wait here for their owners
        self._waiting = (
            0  # bytes of gradients since the last round, this rank's own among them: as many on all ranks
        )
        self._most = max(map(_bytes, self.parameters)) // 2
        if stage >= 2:
            for parameter in self.parameters:
                parameter._register_backward_hook(partial(self._meet, parameter))
        self.stage3 = (
            Stage3(model, self.group, self.parameters, self.owner, self._ask) if stage == 3 else None
        )
        self.offload = Offload(optimizer) if offload else None

    def owner(self, parameter: paddle.Tensor) -> int:
        """Which rank of the axis updates one of the `parameters`."""
        return self._owner[id(parameter)]

    def keeps_gradient(self, parameter: paddle.Tensor) -> bool:
        """Whether this rank has the parameter's gradient when the backwards of an update are done."""
        return self.stage == 1 or self._owner.get(id(parameter), self.group.rank) == self.group.rank

    def finish(self) -> None:
        """After the backwards of an update, and in stage 3 the forward of an evaluation, whatever layers this rank ran:
        takes part in what other ranks still need, until nobody needs anything. Collective."""
        if self.stage >= 2:
            self._rounds.finish(self._wanted())
        if self.stage3 is not None:
            self.stage3.release_all()

    def exchange(self) -> None:
        """Leaves each gradient summed over the axis with its owner, and nowhere else: in stage 1, where none has been
        exchanged yet. Every parameter has one. Collective."""
        if self.stage == 1:
            for parameter in self.parameters:
                self._reduce(parameter)

    def share(self) -> None:
        """After the owners' updates: gives everybody the new parameters; in stage 3 they stay with their owners."""
        if self.stage == 3:
            return
        with paddle.no_grad():
            for parameter in self.parameters:
                dist.broadcast(parameter, self.group.ranks[self.owner(parameter)], self.group)

    def _meet(self, parameter: paddle.Tensor, *_: Any) -> None:
        """Stages 2 and 3, at every backward: a gradient is there, and does not stay unless it is this rank's.

        Some wait for each other, half the largest parameter's size at most, so that rounds are few.
        """
        if parameter.grad is None:
            return
        if not self.keeps_gradient(parameter):
            self._ready.append(self._places[id(parameter)])
        if self.stage3 is not None:
            self.stage3.release(parameter)
        self._waiting += _bytes(parameter)
        if self._waiting >= self._most:
            self._rounds.begin(self._wanted())

    def _ask(self, parameters: Sequence[paddle.Tensor]) -> None:
        """A round for the values of parameters, in which gradients that wait go to their owners, too."""
        values = [len(self.parameters) + self._places[id(parameter)] for parameter in parameters]
        self._rounds.begin([*self._wanted(), *values])

    def _wanted(self) -> list[int]:
        """The gradients that wait here, which wait no more: the round that begins takes them."""
        wanted, self._ready, self._waiting = self._ready, [], 0
        return wanted

    def _serve(self, places: Sequence[int]) -> None:
        for place in places:
            if place < len(self.parameters):
                self._reduce(self.parameters[place])
            elif self.stage3 is not None:
                self.stage3.broadcast(self.parameters[place - len(self.parameters)])

    @paddle.no_grad()
    def _reduce(self, parameter: paddle.Tensor) -> None:
        """Adds a gradient up at its owner and frees it elsewhere; a rank that has none adds nothing.

        In stages 2 and 3 the owner's sums earlier micro-batches, the others' have given theirs away.
        """
        if parameter.grad is None:
            parameter.grad = paddle.zeros(parameter.shape, parameter.dtype)
        dist.reduce(parameter.grad, self.group.ranks[self.owner(parameter)], group=self.group)
        if self.owner(parameter) != self.group.rank:
            parameter.clear_gradient(False)


def _bytes(parameter: paddle.Tensor) -> int:
    return int(parameter.size) * int(parameter.element_size())
