"""Exchanges tensors between the ranks that have branches of the same layers.

Before sending, all ranks need the shapes and dtypes of the branches' outputs.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
import paddle.distributed as dist

from paddle_dp.core.data_group import CommGroups, PaddleGroup
from paddle_dp.errors import UsageError
from paddle_dp.mesh.messages import Messages
from paddle_dp.mesh.transport import traffic
from paddle_dp.strategies.branches.branch_trace import DOCS
from paddle_dp.tensors import dtype_of, nbytes


class TensorSpec(NamedTuple):
    """The shape and dtype of a branch's output; `learns`: it has a gradient."""

    shape: tuple[int, ...]
    dtype: str
    learns: bool

    @classmethod
    def from_tensor(cls, output: paddle.Tensor) -> TensorSpec:
        return cls(tuple(output.shape), dtype_of(output), not output.stop_gradient)


def _form_or_flag(value: Any) -> Hashable:
    """The cache key of an input: a tensor's spec, a flag itself, or the type of anything else."""
    if isinstance(value, paddle.Tensor):
        return TensorSpec.from_tensor(value)
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


class OutputSpecs:
    """The specs of all outputs of a layer with branches, of which each rank computes some.

    Hosts exchange them, without waiting for devices, when the layer first gets inputs of some shapes, and cache them.
    """

    def __init__(self, ranks: PaddleGroup, name: str):
        self._messages = Messages(ranks.ranks, ranks.rank, "branches")
        self._name = name
        self._known: dict[Hashable, list[TensorSpec]] = {}

    def gather(
        self, local: Mapping[int, paddle.Tensor], inputs: Sequence[Any], training: bool
    ) -> list[TensorSpec]:
        """Returns the specs by branch. `local`: outputs of this rank's branches. Collective if these `inputs` are new.

        Raises UsageError if a local output's shape or dtype has changed for such inputs.
        """
        specs = {branch: TensorSpec.from_tensor(output) for branch, output in local.items()}
        autocast = paddle.get_autocast_gpu_dtype() if paddle.is_autocast_enabled() else None
        key = (tuple(map(_form_or_flag, inputs)), training, paddle.is_grad_enabled(), str(autocast))
        if (known := self._known.get(key)) is None:
            message = json.dumps(specs).encode()
            alone = len(self._messages.ranks) == 1
            rows = [message] if alone else self._messages.gather(message, "the outputs of branches")
            forms = {int(branch): form for row in rows for branch, form in json.loads(row).items()}
            known = [
                TensorSpec(tuple(shape), dtype, learns) for _, (shape, dtype, learns) in sorted(forms.items())
            ]
            self._known[key] = known
        for branch, form in specs.items():
            if form[:2] != known[branch][:2]:
                raise UsageError(
                    f"strategy.branches: branch {branch} of {self._name or 'the model'} gave {form.dtype} "
                    f"{list(form.shape)}, and before, for inputs of the same shapes, {known[branch].dtype} "
                    f"{list(known[branch].shape)}: the other ranks expect that. Leave this branch out of the table "
                    f"({DOCS})."
                )
        return known

    def forget(self) -> None:
        """Clears the cache after trials: training may use another precision."""
        self._known.clear()


class BranchExchange:
    """Collectives over `ranks`; all ranks launch them in one order.

    `comm_groups`: groups of the same ranks on an accelerator, in which different ranks' outputs travel concurrently;
    None for the gloo bridge, which counts traffic itself.
    """

    def __init__(self, ranks: PaddleGroup, comm_groups: CommGroups | None = None):
        self.ranks, self._comm_groups = ranks, comm_groups

    @paddle.no_grad()
    def spread(
        self, local: Mapping[int, paddle.Tensor], forms: Sequence[TensorSpec], owners: Sequence[int]
    ) -> list[paddle.Tensor]:
        """Every branch's output on every rank: this rank provides its `local` ones, rank `owners[branch]` of the group
        the others. Collective."""
        outputs, travelling = [], list[Any]()
        for branch, form in enumerate(forms):
            output = copied(local[branch]) if branch in local else paddle.empty(form.shape, form.dtype)
            outputs.append(output)
            if self.ranks.group is not None:
                owner = self.ranks.ranks[owners[branch]]
                group = self.ranks.group if self._comm_groups is None else self._comm_groups.group_of(owner)
                travelling.append(dist.broadcast(output, owner, group=group, sync_op=False))
                if self._comm_groups is not None:
                    traffic.reduced(nbytes(output), len(self.ranks.ranks))
        for task in travelling:
            task.wait()
        return outputs

    def sum(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """The sum over the ranks, as a new tensor. Collective."""
        if self._comm_groups is not None:
            traffic.all_reduced(nbytes(tensor), len(self.ranks.ranks))
        return self.ranks.sum_tensor(copied(tensor))


def copied(tensor: paddle.Tensor) -> paddle.Tensor:
    """A contiguous copy, as collectives require."""
    return tensor.clone() if tensor.is_contiguous() else tensor.contiguous()
