"""Predicts, without ranks, the rank of each branch of a model and the exchanged bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paddle import nn

from paddle_dp.parallel.branches.assignment import drop_remote, ranks_of_layers
from paddle_dp.parallel.branches.branch_trace import observed
from paddle_dp.parallel.branches.branched_model import spread_over
from paddle_dp.parallel.data_group import PaddleGroup
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.precision.amp import cast, read_by
from paddle_dp.plan.rank_memory import Blocks, BranchTraffic


@dataclass(frozen=True)
class Planned:
    """`at`: the ranks of the group that keep a branch's weight, by name; `branches`: exchanged elements per sample."""

    at: dict[str, tuple[int, ...]]
    branches: BranchTraffic

    def annotated(self, blocks: Blocks) -> Blocks:
        """The weights of the model, with the ranks of branches' weights."""
        return [[replace(weight, at=self.at.get(weight.name, ())) for weight in block] for block in blocks]

    def step(self, samples: int, width: int) -> BranchTraffic:
        """The bytes that a step of `samples` samples exchanges, with `width` bytes per element."""
        per_sample, size = self.branches, samples * width
        return BranchTraffic(
            outputs=tuple(numbers * size for numbers in per_sample.outputs), inputs=per_sample.inputs * size
        )


def planned(model: nn.Layer, inputs: Any, ranks: int) -> Planned:
    """Plans from a forward of these inputs. Raises UsageError for a table that does not match the model."""
    traces, _ = observed(model, cast(inputs, read_by(model)))
    spread_over(traces, ranks)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    at = {
        names[id(parameter)]: tuple(sorted(layer_ranks))
        for layer, layer_ranks in ranks_of_layers(traces, ranks)
        for parameter in layer.parameters()
    }
    outputs = [0.0] * ranks
    for trace in traces:
        for size, owner in zip(trace.sizes, trace.owners, strict=True):
            outputs[owner] += size
    return Planned(at, BranchTraffic(outputs=tuple(outputs), inputs=sum(trace.learned for trace in traces)))


def keep_share(model: nn.Layer, inputs: Any, ranks: int, rank: int) -> None:
    """Reduces a model to the layers that one rank of the group has."""
    traces, _ = observed(model, cast(inputs, read_by(model)))
    spread_over(traces, ranks)
    drop_remote(model, traces, PaddleGroup(range(ranks), rank, None), Placements())
