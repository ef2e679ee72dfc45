"""Sums of gradients over the ranks with the same owned parameters, rounded in transit, after backward (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist

from paddle_dp.core.hcg import Group
from paddle_dp.exchange.push import Push
from paddle_dp.exchange.push_reduce import PushReduce
from paddle_dp.exchange.roundings import roundings
from paddle_dp.mesh.traffic import traffic
from paddle_dp.tensors import as_dtype, dtype_of, nbytes


class ReplicaSums:
    """Sums existing gradients over the global `ranks`, all of which have the same ones; `rank` is this one.

    On CPUs, without a `group` of these ranks, each gradient is rounded to `comm_dtype` once and added up in float32,
    and the sum is rounded where it travels (`PushReduce`). On accelerators the group's all-reduce adds in `comm_dtype`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        parameters: Sequence[paddle.Tensor],
        comm_dtype: str,
        group: Group | None = None,
    ):
        self._parameters, self._comm_dtype, self._group = parameters, comm_dtype, group
        self._push: PushReduce | None = None
        if group is None:
            keepers = [list(ranks) for _ in parameters]
            self._push = PushReduce(
                Push("gradients", ranks, rank), parameters, keepers, comm_dtype=comm_dtype
            )

    @paddle.no_grad()
    def exchange(self) -> None:
        """Collective."""
        if self._push is not None:
            self._push.finish()
        if self._group is None:
            return
        sums, tasks = [], []
        for parameter in self._parameters:
            if parameter.grad is not None:
                roundings.note(parameter, parameter.grad, self._comm_dtype, len(self._group.ranks))
                total = as_dtype(parameter.grad, self._comm_dtype)
                traffic.all_reduced(nbytes(total), len(self._group.ranks))
                tasks.append(dist.all_reduce(total, group=self._group, sync_op=False))
                sums.append((parameter, total))
        for (parameter, total), task in zip(sums, tasks, strict=True):
            task.wait()
            parameter._copy_gradient_from(as_dtype(total, dtype_of(parameter)))
