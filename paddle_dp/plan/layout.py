"""A layout, the weights that a rank of it holds, and the bytes of its parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise, product
from typing import Literal

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.memory import StateBytes, Widths, deal, flat_gradient_bytes, state_bytes
from paddle_dp.plan.pipeline_schedule import Partition, Schedule, stage_bounds
from paddle_dp.plan.sharded import max_fetched, most_on_accelerator
from paddle_dp.units import Recompute

ReduceDtype = Literal["bfloat16", "float32"]  # of gradients on their way


def width_of(dtype: str) -> int:
    """Bytes of a number; the name of its dtype ends with its bits."""
    return int(dtype[-2:]) // 8


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of the whole model, by its first name; `size`: its number of elements.

    `cut`: the tensor axis splits it. `frozen`: it has no gradient and no optimizer state, and an owner in stage 3 only.
    `statistic`: it is a BatchNorm's, counts as frozen and never has an owner. `at`: the ranks of the tensor axis that
    hold it; empty: all.
    """

    name: str
    size: int
    shape: tuple[int, ...] = ()
    cut: bool = False
    frozen: bool = False
    statistic: bool = False
    at: tuple[int, ...] = ()

    def local_size(self, tp_size: int) -> int:
        """The number of elements on one rank of the tensor axis."""
        return self.size // tp_size if self.cut else self.size


# The weights of each of a model's ordered blocks; a model without blocks counts as one.
Blocks = Sequence[Sequence[Weight]]


# The forwards or backwards of micro-batches during which bytes are sent; between stages: from a span to the next one.
When = Literal["every forward", "first forward", "every backward", "last backward", "between stages"]
Payload = Literal["gradients", "parameters", "activations"]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Bytes that a rank sends along an axis in one step.

    `received`: the bytes received, if another number. `hides`: the layout's dependencies allow the rank to compute
    meanwhile. `transfers`: between stages, the transfers of one micro-batch.
    """

    axis: str
    payload: Payload
    bytes: float
    when: When
    hides: bool = True
    received: float | None = None
    transfers: int = 1

    @property
    def received_bytes(self) -> float:
        """The bytes received in one step."""
        return self.bytes if self.received is None else self.received


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a strategy splits a model over ranks, as numbers: all that planning and pictures need of a strategy.

    A strategy whose ranks hold or send other bytes than the axes' arithmetic counts has a subclass of it in its folder.
    `partition`: the split of a pipeline's blocks, with `virtual_stages` per rank. `prefetch`: chunks of layers that
    ZeRO's stage 3 fetches ahead. `sequence_parallel`: tensor ranks split the tokens between cut layers. `reduce_dtype`:
    the dtype in which gradients are sent; None: theirs. `asynchronous`: no rank waits for another one to compute.
    `exchange`: data_parallel's exchange by name; "": this package's. `bucket`: bytes of Paddle's buckets. `widths`, the
    bytes per element, follow from optimizer and precision.
    """

    degrees: Degrees
    partition: Partition = "uniform"
    virtual_stages: int = 1
    pipeline_schedule: Schedule = "1f1b"
    sharding_stage: int = 1
    prefetch: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    exchange: str = ""
    bucket: float = 0.0
    reduce_dtype: ReduceDtype | None = None
    asynchronous: bool = False
    widths: Widths = field(default_factory=Widths)
    accelerator: bool = False

    def called(self, axis: str) -> str:
        """The axis's name on the screen."""
        return axis

    @property
    def gradient_on_its_way(self) -> int:
        """Bytes per element of gradients sent along data, sharding and sequence; float64 is sent as it is."""
        width = self.widths.gradient
        return width if self.reduce_dtype is None or width == 8 else width_of(self.reduce_dtype)

    @property
    def devices(self) -> int:
        """The number of devices that a process computes on."""
        return 1

    @property
    def unequal_ranks(self) -> Sequence[int]:
        """The first rank of each stage and owner; the other ranks of a stage or owner hold as much."""
        degrees = self.degrees
        pairs = product(range(degrees.pipeline), range(degrees.sharding))
        return [degrees.rank({"pipeline": stage, "sharding": owner}) for stage, owner in pairs]

    @property
    def extra_label(self) -> str:
        """The name of a rank's extra bytes (`RankMemory`)."""
        return "buffers of the exchange"

    @property
    def state_label(self) -> str:
        """The beginning of the line on a rank's bytes, unless they are one model's."""
        return ""

    @property
    def transient_label(self) -> str:
        """The name of a rank's transient bytes at their peak."""
        and_more = ", copies and gradients" if self.accelerator and self.prefetch else ""
        return f"weights of other owners{and_more} at work or under way"

    def memory(self, blocks: Blocks, rank: int) -> RankMemory:
        return _axes_memory(blocks, self, rank)

    def transfers(self, blocks: Blocks, memory: RankMemory) -> list[Sent] | None:
        """All transfers of a rank in one step; None: `plan.exchange` counts them, axis by axis."""
        return None

    @property
    def sends_float32(self) -> bool:
        """Whether gradients are sent as numbers of 32 bits."""
        return self.gradient_on_its_way == 4

    def gradient_share(self, weights: Sequence[Weight]) -> float:
        """The share of the bytes of these weights' gradients that is sent."""
        return 1.0

    def exchange_state(self, weights: Sequence[Weight]) -> float:
        """Bytes that a rank has for its exchanges from one update to the next, for these trained weights."""
        return 0.0

    def __str__(self) -> str:
        return str(self.degrees).replace("tensor", self.called("tensor"))


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's coordinates, block numbers per stage, numbers of elements (`parameters`, `trained`) and bytes.

    `state`: of a process on several devices, the bytes on its first one. Upper bounds (`plan.memory`): `extra`:
    copies of the weights, compression residuals, flat gradients. `transient`: in stage 3, other owners' parameters that
    are held or under way at once, on an accelerator also copies and gradients in exchange; on a server, the received
    gradients.
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
    """The whole model's number of elements; shared weights count once."""
    return sum(distinct(blocks, range(len(blocks)), 1))


def distinct(
    blocks: Blocks, numbers: Sequence[int] | range, tensor: int, *, frozen: bool | None = None
) -> list[int]:
    """The sizes of these blocks' weights on one rank of the tensor axis; a shared weight counts once.

    `frozen` selects the frozen or the trained weights; None: all.
    """
    weights = distinct_weights(blocks, numbers)
    return [weight.local_size(tensor) for weight in weights if frozen in (None, weight.frozen)]


def distinct_weights(blocks: Blocks, numbers: Sequence[int] | range) -> list[Weight]:
    """The weights of these blocks, each once."""
    return list({weight.name: weight for number in numbers for weight in blocks[number]}.values())


def on_rank(blocks: Blocks, tp_rank: int) -> Blocks:
    """The blocks on one rank of the tensor axis, without other ranks' branches."""
    return [[weight for weight in block if not weight.at or tp_rank in weight.at] for block in blocks]


def owned(weights: Sequence[Weight], layout: Layout) -> dict[str, int]:
    """The owner of each weight that has one, as a sharding rank, by name."""
    kinds = [[w for w in weights if w.frozen == kind and not w.statistic] for kind in (False, True)]
    trained, frozen = ([weight.local_size(layout.degrees.tensor) for weight in kind] for kind in kinds)
    owners = chain(*deal(trained, frozen, layout.degrees.sharding))
    return {
        weight.name: owner
        for weight, owner in zip(chain(*kinds), owners, strict=True)
        if layout.sharding_stage == 3 or not weight.frozen
    }


def _axes_memory(blocks: Blocks, layout: Layout, rank: int) -> RankMemory:
    """The memory of a rank of axes. A weight that two pipeline stages share is on both."""
    degrees, coords = layout.degrees, layout.degrees.coords(rank)
    assert degrees.reads(rank), f"rank {rank} is on no axis: its strategy's layout counts it"
    blocks = on_rank(blocks, coords["tensor"])
    loads = [sum(distinct(blocks, [number], degrees.tensor)) for number in range(len(blocks))]
    bounds = [*pairwise(stage_bounds(loads, degrees.pipeline * layout.virtual_stages, layout.partition))]
    stages = tuple(tuple(range(*stage)) for stage in bounds[coords["pipeline"] :: degrees.pipeline])
    here, owner = [number for stage in stages for number in stage], coords["sharding"]
    trained, frozen = (distinct(blocks, here, degrees.tensor, frozen=kind) for kind in (False, True))
    zero = layout.sharding_stage if degrees.sharding > 1 else 0
    state = state_bytes(trained, degrees.sharding, zero, layout.widths)[owner]
    frozen_sizes, transient = frozen, 0.0
    if zero == 3:
        weights = distinct_weights(blocks, here)
        owner_of = owned(weights, layout)
        owned_frozen = (w for w in weights if w.frozen and owner_of.get(w.name, owner) == owner)
        frozen_sizes = [weight.local_size(degrees.tensor) for weight in owned_frozen]
        transient = _fetched_bytes(blocks, here, layout, owner)
    state = replace(state, parameters=state.parameters + sum(frozen_sizes) * layout.widths.parameter)
    return RankMemory(
        rank=rank, coords=coords, stages=stages, parameters=sum(trained) + sum(frozen), trained=sum(trained),
        state=state, extra=_extra_bytes(blocks, here, layout), transient=transient,
    )  # fmt: skip


def _extra_bytes(blocks: Blocks, here: Sequence[int], layout: Layout) -> float:
    """Bytes of the exchanges' state and of flat gradients."""
    trained = [weight for weight in distinct_weights(blocks, here) if not weight.frozen]
    sizes = [weight.local_size(layout.degrees.tensor) for weight in trained]
    way = "bucketed" if layout.exchange == "auto" and layout.accelerator else layout.exchange
    buffers = flat_gradient_bytes(way, float(sum(sizes) * layout.widths.gradient), layout.bucket)
    width_there = layout.gradient_on_its_way
    if layout.accelerator and layout.degrees.sharding == 1 and width_there != layout.widths.gradient:
        buffers += sum(sizes) * width_there  # received sums, until they are converted to gradients
    return layout.exchange_state(trained) + buffers


def layers(block: Sequence[Weight]) -> list[list[Weight]]:
    """A block's weights by layer, without statistics; names within a layer differ only in their last part."""
    by_layer = groupby(block, key=lambda weight: weight.name.rpartition(".")[0])
    return [[weight for weight in layer if not weight.statistic] for _, layer in by_layer]


def layer_loads(
    weights_by_layer: Sequence[Sequence[Weight]], owner_of: Mapping[str, int], layout: Layout
) -> list[list[int]]:
    """The number of elements of each layer at each owner, [layers, owners]."""
    loads = [[0] * layout.degrees.sharding for _ in weights_by_layer]
    for load, layer in zip(loads, weights_by_layer, strict=True):
        for weight in layer:
            load[owner_of[weight.name]] += weight.local_size(layout.degrees.tensor)
    return loads


def _fetched_bytes(blocks: Blocks, here: Sequence[int], layout: Layout, owner: int) -> float:
    """The largest number of fetched bytes, if layers run in the order of their weights."""
    weights_by_layer = [layer for number in here for layer in layers(blocks[number])]
    loads = layer_loads(weights_by_layer, owned(distinct_weights(blocks, here), layout), layout)
    learns = [any(not weight.frozen for weight in layer) for layer in weights_by_layer]
    if layout.accelerator and layout.prefetch:  # too much with frozen layers: as if they had gradients
        most = most_on_accelerator(loads, owner, layout.prefetch)
    else:
        first = learns.index(True) if any(learns) else len(loads)
        most = max_fetched(loads, owner, layout.prefetch, first)
    return float(most * layout.widths.parameter)


def rank_memories(blocks: Blocks, layout: Layout) -> list[RankMemory]:
    """The memory of ranks that hold unequal amounts: the first one of each kind."""
    return [layout.memory(blocks, rank) for rank in layout.unequal_ranks]
