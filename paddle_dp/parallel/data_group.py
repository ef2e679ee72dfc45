"""The ranks that hold the same part of the model and read different samples: along the data and the sharding axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle
import paddle.distributed as dist

from paddle_dp.parallel.hcg import HCG


class Among(Protocol):
    """The ranks over which a layer gathers and sums: all of a mesh, or some."""

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]: ...

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor: ...


class DataGroup:
    """The ranks along data and sharding as one group: fleet has a group for each of the two axes."""

    def __init__(self, groups: Sequence[Any]):
        self.groups = [group for group in groups if group.nranks > 1]

    @classmethod
    def of(cls, hcg: HCG) -> DataGroup:
        """This rank's group in fleet's HybridCommunicateGroup."""
        return cls([hcg.get_data_parallel_group(), hcg.get_sharding_parallel_group()])

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every reader's `tensor` (equal shapes and dtypes), in the same order on all of them. Collective."""
        gathered = tensor.unsqueeze(0)
        for group in self.groups:
            parts: list[paddle.Tensor] = []
            dist.all_gather(parts, gathered, group=group)
            gathered = paddle.concat(parts)
        return list(gathered)

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the readers, in place, and returns it. Collective."""
        for group in self.groups:
            dist.all_reduce(tensor, group=group)
        return tensor
