"""Sharding: along one axis of ranks that read different samples, each parameter's update has one owner.

ZeRO (Rajbhandari et al., arXiv:1910.02054): stage 1 keeps the optimizer's states with the owner only, stage 2 the
gradients too, stage 3 the parameters too. Who owns what is fleet's decision, and so are the groups; why stages 2 and 3
are not fleet's own, docs/decisions/0008 says.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import DygraphShardingOptimizer

from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel.consistency import check_gradients, has_gradient
from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.sharding.offload import Offload
from paddle_dp.parallel.sharding.stage3 import Stage3

Parameters = list[tuple[str, paddle.Tensor]]


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
            placements.note(parameter, owner=self.owner(parameter), stored_by_owner=stage == 3)
        self.met: list[paddle.Tensor] = []  # in this batch, in the order of the first backward
        if stage >= 2:
            for parameter in self.parameters:
                parameter._register_backward_hook(partial(self._meet, parameter))
        self.stage3 = Stage3(model, self.group, self.parameters, self.owner) if stage == 3 else None
        self.offload = Offload(optimizer) if offload else None

    def owner(self, parameter: paddle.Tensor) -> int:
        """Which rank of the axis updates one of the `parameters`."""
        return self._owner[id(parameter)]

    def check(self, named: Parameters, mesh: Mesh) -> None:
        """Raises DivergenceError unless all ranks have the same gradients to exchange. Collective."""
        met = {id(parameter) for parameter in self.met}
        had = has_gradient if self.stage == 1 else lambda parameter: id(parameter) in met
        check_gradients(named, mesh, find_unused_parameters=None, had=had)

    def exchange(self) -> None:
        """Leaves each gradient summed over the axis with its owner, and nowhere else. Collective."""
        if self.stage == 1:
            for parameter in self.parameters:
                self._meet(parameter)
        self.met.clear()

    def share(self) -> None:
        """After the owners' updates: gives everybody the new parameters; in stage 3 they stay with their owners."""
        if self.stage == 3:
            return
        with paddle.no_grad():
            for parameter in self.parameters:
                dist.broadcast(parameter, self.group.ranks[self.owner(parameter)], self.group)

    @paddle.no_grad()
    def _meet(self, parameter: paddle.Tensor, *_: Any) -> None:
        """Adds a gradient up at its owner and frees it elsewhere.

        In stages 2 and 3 at every backward: the owner's sums earlier micro-batches, the others' are of this one alone.
        """
        if parameter.grad is None:
            return
        self.met.append(parameter)
        dist.reduce(parameter.grad, self.group.ranks[self.owner(parameter)], group=self.group)
        if self.owner(parameter) != self.group.rank:
            parameter.clear_gradient(False)
        if self.stage3 is not None:
            self.stage3.release(parameter)
