"""What carries tensors between the ranks that have branches of the same layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.mesh.traffic import traffic
from paddle_dp.parallel.branches.forms import Form
from paddle_dp.parallel.data_group import Ranks
from paddle_dp.parallel.exchange.lanes import Lanes
from paddle_dp.parallel.exchange.memory import nbytes


class Wires:
    """Collectives of `ranks`; all ranks launch them in one order. `lanes`: groups of the same ranks on an accelerator,
    so that one rank's outputs travel while another's do; the gloo bridge, which counts by itself, has none."""

    def __init__(self, ranks: Ranks, lanes: Lanes | None = None):
        self.ranks, self._lanes = ranks, lanes

    @paddle.no_grad()
    def spread(
        self, own: Mapping[int, paddle.Tensor], forms: Sequence[Form], owners: Sequence[int]
    ) -> list[paddle.Tensor]:
        """Every branch's output, of which this rank has its `own`, and the rank with the place `owners[branch]` each.
        Collective."""
        outputs, travelling = [], list[Any]()
        for branch, form in enumerate(forms):
            output = copied(own[branch]) if branch in own else paddle.empty(form.shape, form.dtype)
            outputs.append(output)
            if self.ranks.group is not None:
                owner = self.ranks.ranks[owners[branch]]
                group = self.ranks.group if self._lanes is None else self._lanes.of(owner)
                travelling.append(dist.broadcast(output, owner, group=group, sync_op=False))
                if self._lanes is not None:
                    traffic.reduced(nbytes(output), len(self.ranks.ranks))
        for task in travelling:
            task.wait()
        return outputs

    def sum(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Its sum over the ranks, as a new tensor. Collective."""
        if self._lanes is not None:
            traffic.all_reduced(nbytes(tensor), len(self.ranks.ranks))
        return self.ranks.sum_tensor(copied(tensor))


def copied(tensor: paddle.Tensor) -> paddle.Tensor:
    """A tensor in memory of its own, in the order of its elements, as collectives want it."""
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()
