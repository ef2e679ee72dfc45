"""The weights that a rank of a layout holds, and the bytes of its parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.extra_memory import flat_gradient_bytes, inbound_bytes, residual_bytes
from paddle_dp.plan.memory import StateBytes, Widths, deal, owners, state_bytes
from paddle_dp.plan.partition import Partition, stage_bounds
from paddle_dp.plan.pipeline_schedule import Schedule
from paddle_dp.plan.sharded import max_fetched, most_on_accelerator
from paddle_dp.units import Compress, Recompute


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of a whole model: its first name, its number of elements and its `shape`, whether the tensor axis
    cuts it, and whether it is frozen: then it has no gradient and no optimizer state, and an owner in stage 3 only. A
    `statistic` of a BatchNorm, which counts as frozen, never has one. `at`: of a weight of branches, the ranks of the
    tensor axis that have it; empty: all."""

    name: str
    size: int
    shape: tuple[int, ...] = ()
    cut: bool = False
    frozen: bool = False
    statistic: bool = False
    at: tuple[int, ...] = ()

    def local_size(self, tp_size: int) -> int:
        """The number of its elements on one rank of the tensor axis."""
        return self.size // tp_size if self.cut else self.size


# The weights of each of a model's ordered blocks; a model without blocks counts as one.
Blocks = Sequence[Sequence[Weight]]


@dataclass(frozen=True, kw_only=True)
class BranchTraffic:
    """What the branches of a model exchange in one step, in bytes, of all samples of a dp_rank: the `outputs` of each
    rank of the tensor axis, and those `inputs` of their layers that have a gradient. Without outputs: nobody looked."""

    outputs: tuple[float, ...] = ()
    inputs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a strategy splits a model over ranks, as numbers: all that planning and pictures need of a strategy.

    `degrees` of the axes; a pipeline's `partition` of the blocks, with `virtual_stages` on each rank, and its schedule;
    ZeRO's `sharding_stage`, and how many chunks of layers its stage 3 fetches ahead (`prefetch`); whether tensor ranks
    split the tokens between cut layers (`sequence_parallel`); what is recomputed; what data ranks `compress` gradients
    to, or the `reduce_dtype` in which all travel, where it is not their own. `averaged_every`: in how many steps
    weights travel once, in place of each step's gradients (0: these do), with `averaged_states` the optimizer's, too;
    so many `copies` of the trained weights are kept besides. `asynchronous`: no rank waits for another one to compute.
    `exchange`: data_parallel's word for it, with Paddle's buckets of so many bytes (`bucket`); "": ours.
    `branches`: the ranks of the tensor axis have branches of layers, and no slices.
    `replicas`: of the whole model in each process; `separate_devices`: on an accelerator each where there are some.
    `widths`, the bytes per element, follow from optimizer and precision.
    """

    degrees: Degrees
    partition: Partition = "uniform"
    virtual_stages: int = 1
    pipeline_schedule: Schedule = "1f1b"
    sharding_stage: int = 1
    prefetch: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    compress: Compress = field(default_factory=Compress)
    exchange: str = ""
    bucket: float = 0.0
    reduce_dtype: Literal["bfloat16", "float32"] | None = None
    averaged_every: int = 0
    averaged_states: bool = False
    copies: float = 0.0
    asynchronous: bool = False
    branches: BranchTraffic | None = None
    replicas: int = 1
    separate_devices: bool = False
    widths: Widths = field(default_factory=Widths)
    accelerator: bool = False

    def called(self, axis: str) -> str:
        """An axis on the screen: «branches», where that is what its ranks have."""
        return "branches" if axis == "tensor" and self.branches is not None else axis

    @property
    def gradient_on_its_way(self) -> int:
        """Bytes per element of gradients that travel along data, sharding and sequence; float64 travels as it is."""
        width = self.widths.gradient
        return (
            width
            if self.reduce_dtype is None or width == 8
            else {"bfloat16": 2, "float32": 4}[self.reduce_dtype]
        )

    @property
    def devices(self) -> int:
        """On which the replicas of one process are."""
        return self.replicas if self.separate_devices and self.accelerator else 1

    def __str__(self) -> str:
        return str(self.degrees).replace("tensor", self.called("tensor"))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank: its coordinates, its blocks by number (one tuple per stage), number of parameters, how many of them are
    `trained`, and bytes. Of a process with replicas, the state of those on its first device.

    Besides these, at most (`plan.extra_memory`): `extra`, copies of the weights, errors of compression, flat gradients;
    `transient`, in stage 3 other owners' parameters that are here or under way at once, and on an accelerator copies
    and gradients that are being exchanged; on a server the workers' gradients that have come.
    """

    rank: int
    coords: dict[str, int]
    stages: tuple[tuple[int, ...], ...]
    parameters: int
    trained: int
    state: StateBytes
    extra: float = 0.0
    transient: float = 0.0

    @property
    def total(self) -> float:
        return self.state.total + self.extra + self.transient

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(number for stage in self.stages for number in stage)


def total_parameters(blocks: Blocks) -> int:
    """The number of the whole model's parameters; one that several blocks share counts once."""
    return sum(distinct(blocks, range(len(blocks)), 1))


def distinct(
    blocks: Blocks, numbers: Sequence[int] | range, tensor: int, *, frozen: bool | None = None
) -> list[int]:
    """The sizes of these blocks' weights on one rank of the tensor axis; one that several share counts once. Only those
    that are `frozen`, or are not, where that is given."""
    weights = distinct_weights(blocks, numbers)
    return [weight.local_size(tensor) for weight in weights if frozen in (None, weight.frozen)]


def distinct_weights(blocks: Blocks, numbers: Sequence[int] | range) -> list[Weight]:
    """The weights of these blocks, each once."""
    return list({weight.name: weight for number in numbers for weight in blocks[number]}.values())


def on_rank(blocks: Blocks, tp_rank: int) -> Blocks:
    """The blocks as a rank of the tensor axis has them, without the branches of others."""
    return [[weight for weight in block if not weight.at or tp_rank in weight.at] for block in blocks]


def owned(weights: Sequence[Weight], layout: Layout) -> dict[str, int]:
    """The rank of the sharding axis that owns each weight that has an owner, by name."""
    kinds = [[w for w in weights if w.frozen == kind and not w.statistic] for kind in (False, True)]
    trained, frozen = (
        [weight.local_size(layout.degrees.tensor) for weight in weights_of_kind] for weights_of_kind in kinds
    )
    dealt = deal(trained, frozen, layout.degrees.sharding)
    return {
        weight.name: owner
        for weights_of_kind, owners_of_kind in zip(kinds, dealt, strict=True)
        for weight, owner in zip(weights_of_kind, owners_of_kind, strict=True)
        if layout.sharding_stage == 3 or not weight.frozen
    }


def rank_memory(blocks: Blocks, layout: Layout, rank: int) -> RankMemory:
    """The blocks and the memory of `rank`. A weight that two pipeline stages share is on both."""
    degrees = layout.degrees
    if degrees.servers:
        return _with_servers(blocks, layout, rank)
    coords = degrees.coords(rank)
    blocks = on_rank(blocks, coords["tensor"])
    loads = [sum(distinct(blocks, [number], degrees.tensor)) for number in range(len(blocks))]
    bounds = stage_bounds(loads, degrees.pipeline * layout.virtual_stages, layout.partition)
    stages = tuple(
        tuple(range(bounds[virtual_stage], bounds[virtual_stage + 1]))
        for virtual_stage in range(
            coords["pipeline"], degrees.pipeline * layout.virtual_stages, degrees.pipeline
        )
    )
    here = [number for stage in stages for number in stage]
    trained, frozen = (distinct(blocks, here, degrees.tensor, frozen=kind) for kind in (False, True))
    zero = layout.sharding_stage if degrees.sharding > 1 else 0
    state = state_bytes(trained, degrees.sharding, zero, layout.widths)[coords["sharding"]]
    frozen_sizes = frozen
    if zero == 3:
        weights = distinct_weights(blocks, here)
        owner_of = owned(weights, layout)
        owned_frozen = (
            w for w in weights if w.frozen and owner_of.get(w.name, coords["sharding"]) == coords["sharding"]
        )
        frozen_sizes = [weight.local_size(degrees.tensor) for weight in owned_frozen]
    times = layout.replicas // layout.devices  # copies in one memory
    parameters = state.parameters + sum(frozen_sizes) * layout.widths.parameter
    state = replace(state, parameters=times * parameters, gradients=times * state.gradients)
    transient = _fetched_bytes(blocks, here, layout, coords["sharding"]) if zero == 3 else 0.0
    return RankMemory(
        rank=rank,
        coords=coords,
        stages=stages,
        parameters=sum(trained) + sum(frozen),
        trained=sum(trained),
        state=state,
        extra=_extra_bytes(blocks, here, layout),
        transient=transient,
    )


def _extra_bytes(blocks: Blocks, here: Sequence[int], layout: Layout) -> float:
    """Bytes of copies of the trained weights, of the errors of compression, and of flat gradients."""
    trained = [weight for weight in distinct_weights(blocks, here) if not weight.frozen]
    sizes = [weight.local_size(layout.degrees.tensor) for weight in trained]
    shapes = [weight.shape for weight in trained]
    width = layout.widths.parameter
    errors = residual_bytes(layout.compress, zip(sizes, shapes, strict=True), width, layout.accelerator)
    way = "bucketed" if layout.exchange == "auto" and layout.accelerator else layout.exchange
    buffers = flat_gradient_bytes(way, float(sum(sizes) * layout.widths.gradient), layout.bucket)
    width_there = layout.gradient_on_its_way
    if layout.accelerator and layout.degrees.sharding == 1 and width_there != layout.widths.gradient:
        buffers += sum(sizes) * width_there  # sums as they came, until gradients are made of them
    return layout.copies * sum(sizes) * width + errors + buffers


def _with_servers(blocks: Blocks, layout: Layout, rank: int) -> RankMemory:
    """A worker holds the whole model and its gradients; a server its part of what is trained, with the gradients' sum
    and the optimizer's states, a copy of what is frozen, and what comes from the workers."""
    degrees, every = layout.degrees, range(len(blocks))
    trained, frozen = (sum(distinct(blocks, every, 1, frozen=kind)) for kind in (False, True))
    serves = rank < degrees.servers
    elements = served(blocks, layout)[rank] if serves else trained
    return RankMemory(
        rank=rank,
        coords=degrees.coords(rank),
        stages=(tuple(every),),
        parameters=elements + frozen,
        trained=elements,
        state=StateBytes(
            parameters=float((elements + frozen) * layout.widths.parameter),
            gradients=float(elements * layout.widths.gradient),
            optimizer=float(elements * layout.widths.optimizer if serves else 0),
        ),
        transient=inbound_bytes(elements, layout.widths.gradient, degrees.dp_size, not layout.asynchronous)
        if serves
        else 0.0,
    )


def served(blocks: Blocks, layout: Layout) -> list[int]:
    """How many of the trained parameters' elements each server has."""
    sizes = distinct(blocks, range(len(blocks)), 1, frozen=False)
    dealt = list(zip(sizes, owners(sizes, layout.degrees.servers), strict=True))
    return [sum(size for size, owner in dealt if owner == server) for server in range(layout.degrees.servers)]


def layers(block: Sequence[Weight]) -> list[list[Weight]]:
    """A block's weights, without statistics, by layer: those whose names differ in the last word."""
    by_layer = groupby(block, key=lambda weight: weight.name.rpartition(".")[0])
    return [[weight for weight in layer if not weight.statistic] for _, layer in by_layer]


def layer_loads(
    weights_by_layer: Sequence[Sequence[Weight]], owner_of: Mapping[str, int], layout: Layout
) -> list[list[int]]:
    """Of each layer the number of elements at each owner, [layers, owners]."""
    loads = [[0] * layout.degrees.sharding for _ in weights_by_layer]
    for load, layer in zip(loads, weights_by_layer, strict=True):
        for weight in layer:
            load[owner_of[weight.name]] += weight.local_size(layout.degrees.tensor)
    return loads


def _fetched_bytes(blocks: Blocks, here: Sequence[int], layout: Layout, owner: int) -> float:
    """As if layers ran in the order of their weights."""
    weights_by_layer = [layer for number in here for layer in layers(blocks[number])]
    loads = layer_loads(weights_by_layer, owned(distinct_weights(blocks, here), layout), layout)
    learns = [any(not weight.frozen for weight in layer) for layer in weights_by_layer]
    if layout.accelerator and layout.prefetch:  # with frozen ones too much: as if they had gradients
        most = most_on_accelerator(loads, owner, layout.prefetch)
    else:
        first = learns.index(True) if any(learns) else len(loads)
        most = max_fetched(loads, owner, layout.prefetch, first)
    return float(most * layout.widths.parameter)


def rank_memories(blocks: Blocks, layout: Layout) -> list[RankMemory]:
    """The distinct ones: ranks along data, sequence and tensor hold as much as their first, but for those that have
    branches; and each server."""
    degrees = layout.degrees
    if degrees.servers:
        return [rank_memory(blocks, layout, rank) for rank in range(degrees.servers + 1)]
    return [
        rank_memory(blocks, layout, degrees.rank({"pipeline": stage, "sharding": owner, "tensor": tp_rank}))
        for stage in range(degrees.pipeline)
        for owner in range(degrees.sharding)
        for tp_rank in range(degrees.tensor if layout.branches is not None else 1)
    ]
