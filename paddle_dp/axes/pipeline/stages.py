"""Assigns a finished model's ordered blocks to pipeline stages, and keeps weights that several stages share equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_dp.batch import Structure, call, unflatten
from paddle_dp.core.blocks import learns_of, outside, settle, sizes_of
from paddle_dp.core.data_group import HCG
from paddle_dp.core.placed_model import ModelNames, NamedTensors
from paddle_dp.core.placement import Placements
from paddle_dp.errors import UsageError
from paddle_dp.mesh import new_group
from paddle_dp.plan import Partition, stage_bounds
from paddle_dp.plan.pipeline_schedule import check_partition, unlearning


class Stages(PipelineLayer):
    """Fleet's PipelineLayer with given stage `bounds`, for any number of stages on a rank.

    Fleet accepts bounds for one stage per rank only; for several it counts layers of one class.
    """

    def __init__(
        self, blocks: Sequence[nn.Layer], bounds: Sequence[int], hcg: HCG, loss: Any, virtual_stages: int
    ):
        # The structure of the model's inputs; the first block gets a tuple of their leaves.
        self.reads: Structure = None
        super().__init__(
            layers=blocks, loss_fn=loss, topology=hcg.topology(), num_virtual_pipeline_stages=virtual_stages,
            seg_method="layer:" + ",".join(map(str, bounds)),  # the form that fleet requires
        )  # fmt: skip
        # Drop the references to other ranks' blocks, so that they are freed.
        self._layers_desc: list[nn.Layer] = []

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:
        if self.reads is None or self._stage_id or chunk_id:
            return super().forward(input, chunk_id)
        self.update_run_function(chunk_id)
        first, *following = self.run_function
        outputs = call(first, unflatten(self.reads, list(input)), first.forward)
        for block in following:
            outputs = block(outputs)
        return outputs

    def _segment_network(self, seg_method: str) -> None:
        super()._segment_network(_bounds(seg_method))

    def _segment_network_for_interleave(self, seg_method: str) -> None:
        self.segment_parts = bounds = _bounds(seg_method)
        for stage in range(self._stage_id, self._total_stages_with_virtual_stages, self._num_stages):
            self._start_poss.append(bounds[stage])
            self._end_poss.append(bounds[stage + 1])


def _bounds(seg_method: str) -> list[int]:
    return [int(bound) for bound in seg_method.removeprefix("layer:").split(",")]


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several stages use: each has a copy, and the copies' gradients are summed over `group`."""

    parameter: paddle.Tensor
    group: Any

    def add_up(self) -> None:
        """Sums the gradient over all uses, bit-equal on the stages that have a copy. Collective over them."""
        with paddle.no_grad():
            dist.all_reduce(self.parameter.grad, group=self.group)


class LocalStages(ModelNames):
    """The names of this rank's stages of `model`: its `blocks`, by number. `tied`: weights that other stages use, too.

    `named_parameters` lists a weight that blocks share under its first name in the whole model, `state` under all its
    names.
    """

    def __init__(self, model: nn.Layer, blocks: dict[int, nn.Layer], tied: Sequence[TiedWeight] = ()):
        self._blocks, self.tied = blocks, tied
        layer_ids = {id(layer) for block in blocks.values() for layer in block.sublayers(include_self=True)}
        named = model.named_sublayers(include_self=True, remove_duplicate=False)
        self._layers = [(name, layer) for name, layer in named if id(layer) in layer_ids]
        ids = {id(p) for _, layer in self._layers for p in layer.parameters(include_sublayers=False)}
        self._parameters = [(name, p) for name, p in model.named_parameters() if id(p) in ids]

    def elements(self) -> list[tuple[int, nn.Layer]]:
        return list(self._blocks.items())

    def named_layers(self) -> list[tuple[str, nn.Layer]]:
        return list(self._layers)

    def named_parameters(self) -> NamedTensors:
        return list(self._parameters)

    def named_buffers(self) -> NamedTensors:
        return [
            (f"{layer_name}.{key}", tensor)
            for layer_name, layer in self._layers
            for key, tensor in layer.named_buffers(include_sublayers=False)
        ]

    def state(self) -> dict[str, paddle.Tensor]:
        """Reads the layers' tensors at each call, because forward may replace a buffer's tensor."""
        return {
            f"{layer_name}.{key}": tensor
            for layer_name, layer in self._layers
            for key, tensor in layer.state_dict(include_sublayers=False).items()
        }

    def blocks_of_layers(self) -> dict[int, int]:
        return {
            id(layer): number
            for number, block in sorted(self._blocks.items(), reverse=True)
            for layer in block.sublayers(include_self=True)
        }


def build_stages(
    model: nn.Layer,
    loss: Any,
    hcg: HCG,
    placements: Placements,
    partition: Partition = "uniform",
    virtual_stages: int = 1,
) -> tuple[Stages, LocalStages]:
    """The model's blocks as fleet's PipelineLayer, and this rank's `virtual_stages` stages of it. Collective.

    Raises UsageError for a model without blocks or with parameters outside them, and for an impossible `partition`.
    """
    blocks = _blocks(model)
    if not (wrong := check_partition(partition, len(blocks), _stages(hcg) * virtual_stages)):
        bounds = stage_bounds(sizes_of(blocks), _stages(hcg) * virtual_stages, partition)
        wrong = unlearning(bounds, _stages(hcg), learns_of(blocks))
    if wrong:
        raise UsageError(f"strategy.pipeline: {'; '.join(wrong)}.")
    holders = {
        number: stage % _stages(hcg)
        for stage in range(len(bounds) - 1)
        for number in range(bounds[stage], bounds[stage + 1])
    }
    tied = _tie(blocks, holders, hcg, placements)
    local = {n: block for n, block in enumerate(blocks) if holders[n] == hcg.get_stage_id()}
    return Stages(blocks, bounds, hcg, loss, virtual_stages), LocalStages(model, local, tied)


def _stages(hcg: HCG) -> int:
    return int(hcg.get_pipe_parallel_world_size())


def _blocks(model: nn.Layer) -> list[nn.Layer]:
    blocks = settle(model, chain=True)
    if not blocks:
        raise UsageError(
            f"strategy.pipeline: {type(model).__name__} has no ordered `blocks`, so it cannot be split into stages. "
            "Name them (docs/add-a-part.md), or set strategy.pipeline=1."
        )
    left = outside(model, blocks)
    if left:
        raise UsageError(
            f"strategy.pipeline: {type(model).__name__} has '{left[0]}' outside its `blocks`, in no stage. "
            "Move it into the block that uses it, or set strategy.pipeline=1."
        )
    return blocks


def _tie(
    blocks: Sequence[nn.Layer], holders: dict[int, int], hcg: HCG, placements: Placements
) -> list[TiedWeight]:
    """This rank's weights that several stages use; the first of these stages has the saved copy. Collective.

    Fleet's SharedLayerDesc shares whole layers that it builds itself under its names; here a tied weight is somewhere
    within a finished block.
    """
    users: dict[int, tuple[paddle.Tensor, set[int]]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(id(parameter), (parameter, set()))[1].add(holders[number])
    tied, groups = [], {}
    for parameter, on in users.values():
        if len(on) == 1:
            continue
        if hcg.get_sharding_parallel_world_size() > 1:
            raise UsageError(
                f"strategy.sharding: the weight {list(parameter.shape)} that stages {sorted(on)} share would have "
                "another owner on each of them. Set model.tied=false, strategy.sharding=1 or strategy.pipeline=1."
            )
        stages = tuple(sorted(on))
        if stages not in groups:
            groups[stages] = group_of_stages(stages, hcg)
        if hcg.get_stage_id() in on:
            placements.record(parameter, first_copy=hcg.get_stage_id() == stages[0])
            tied.append(TiedWeight(parameter, groups[stages]))
    return tied


def group_of_stages(stages: tuple[int, ...], hcg: HCG) -> Any:
    """A new group of the ranks of this rank's pipeline that hold `stages`. Collective: all ranks create all groups."""
    local_group = None
    for pipeline in hcg.topology().get_comm_list("pipe"):
        group = new_group(pipeline[stage] for stage in stages)
        local_group = group if dist.get_rank() in pipeline else local_group
    return local_group
