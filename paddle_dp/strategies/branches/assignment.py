"""Assigns branches to ranks, and removes the layers of other ranks' branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle import nn

from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.data_group import PaddleGroup
from paddle_dp.core.placement import Placements
from paddle_dp.errors import UsageError
from paddle_dp.strategies.branches.branch_trace import DOCS, BranchTrace, holder


def assign(work: Sequence[float], ranks: int) -> list[int]:
    """The rank of each branch: the largest first, each to the rank with the least work so far."""
    loads, owners = [0.0] * ranks, [0] * len(work)
    for branch in sorted(range(len(work)), key=lambda b: (-work[b], b)):
        owners[branch] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[branch]] += work[branch]
    return owners


class AbsentLayer(nn.Layer):
    """Stands for a layer that only other ranks have."""

    def forward(self, *inputs: Any) -> Any:
        raise RuntimeError("this layer is of a branch that another rank computes")


def drop_remote(
    model: nn.Layer, traces: Sequence[BranchTrace], ranks: PaddleGroup, placements: Placements
) -> list[str]:
    """Replaces the layers of other ranks' branches, and records the ranks of each weight and buffer. Returns the names
    of weights that branches of several ranks share."""
    having = ranks_of_layers(traces, len(ranks.ranks))
    _refuse_entangled(model, having)
    names = {id(p): name for name, p in model.named_parameters()}
    shared = set()
    for layer, ranks_with_it in having:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if ranks.group_rank in ranks_with_it:
                placements.record(tensor, only_at=min(ranks_with_it))
            if len(ranks_with_it) > 1 and not tensor.stop_gradient:
                shared.add(names[id(tensor)])
    elsewhere = {id(layer) for layer, ranks_with_it in having if ranks.group_rank not in ranks_with_it}
    for trace in traces:
        for parent, key in (holder(trace.layer, path) for chain in trace.chains for path in chain):
            if id(parent._sub_layers[key]) in elsewhere:
                parent._sub_layers[key] = AbsentLayer()
    return sorted(shared)


def ranks_of_layers(traces: Sequence[BranchTrace], ranks: int) -> list[tuple[nn.Layer, set[int]]]:
    """The branches' layers, each with the ranks of the group that keep it: its branch's rank, or all ranks, to sum its
    gradients, if branches of several ranks share it."""
    by_layer: dict[int, tuple[nn.Layer, set[int]]] = {}
    for trace in traces:
        for chain, owner in zip(trace.chains, trace.owners, strict=True):
            for path in chain:
                parent, key = holder(trace.layer, path)
                layer = parent._sub_layers[key]
                by_layer.setdefault(id(layer), (layer, set()))[1].add(owner)
    return [(layer, owners if len(owners) == 1 else set(range(ranks))) for layer, owners in by_layer.values()]


def _refuse_entangled(model: nn.Layer, layers: Sequence[tuple[nn.Layer, set[int]]]) -> None:
    """Raises UsageError for a weight within and outside a branch or in layers of different ranks, and for a BatchNorm
    of several ranks."""
    names = {id(p): name for name, p in model.named_parameters()}
    outside = _without(model, [layer for layer, _ in layers])
    trace: dict[int, set[int]] = {}
    for layer, owners in layers:
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if id(tensor) in outside or trace.setdefault(id(tensor), owners) != owners:
                raise UsageError(
                    f"strategy.branches: {names.get(id(tensor), 'a buffer')} is in a branch and also elsewhere, so its "
                    f"gradient would come from both: leave that branch out of the table ({DOCS})."
                )
        if len(owners) > 1 and statistics(layer):
            raise UsageError(
                "strategy.branches: branches share a BatchNorm, whose running statistics would be those of one "
                "branch's samples on each rank: give each a separate one, or use a norm without statistics."
            )


def _without(model: nn.Layer, branches: Sequence[nn.Layer]) -> set[int]:
    """The ids of weights and buffers outside these layers."""
    within = {id(layer) for branch in branches for layer in branch.sublayers(include_self=True)}
    return {
        id(tensor)
        for layer in model.sublayers(include_self=True)
        if id(layer) not in within
        for tensor in [
            *layer.parameters(include_sublayers=False),
            *layer.buffers(include_sublayers=False),
        ]
    }
