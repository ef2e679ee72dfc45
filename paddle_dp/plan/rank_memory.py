"""Which of a model's weights a rank of a layout holds, and the bytes of what it keeps while it learns. No paddle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.memory import StateBytes, Widths, state_bytes
from paddle_dp.plan.partition import Partition, stage_bounds
from paddle_dp.plan.pipeline_schedule import Schedule
from paddle_dp.units import Recompute


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter of a whole model: its first name, how many numbers it is, and whether the tensor axis cuts it."""

    name: str
    size: int
    cut: bool = False

    def part(self, tp_size: int) -> int:
        """The numbers of it that one rank of the tensor axis holds."""
        return self.size // tp_size if self.cut else self.size


Blocks = Sequence[
    Sequence[Weight]
]  # the weights of each of a model's ordered blocks; one block, where it has none


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a strategy lays a model out on ranks, as arithmetic: all that planning and pictures ask of a strategy.

    `degrees` of the axes; a pipeline's `partition` of the blocks into `virtual_stages` on each rank, and its schedule;
    ZeRO's `sharding_stage`; whether tensor ranks share the tokens between cut layers (`sequence_parallel`); what is
    computed again. `widths` are the bytes for one parameter: no strategy's, but the optimizer's and the precision's.
    """

    degrees: Degrees
    partition: Partition = "uniform"
    virtual_stages: int = 1
    pipeline_schedule: Schedule = "1f1b"
    sharding_stage: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    widths: Widths = field(default_factory=Widths)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank holds: its coordinates, its blocks by number (a tuple a stage), parameters and state."""

    rank: int
    coords: dict[str, int]
    stages: tuple[tuple[int, ...], ...]
    parameters: int
    state: StateBytes

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(number for stage in self.stages for number in stage)


def whole(blocks: Blocks) -> int:
    """The parameters of the whole model; one that several blocks share counts once."""
    return sum(distinct(blocks, range(len(blocks)), 1))


def distinct(blocks: Blocks, numbers: Sequence[int] | range, tensor: int) -> list[int]:
    """The sizes of what one rank of the tensor axis holds of these blocks; a weight that several share, once."""
    found = {weight.name: weight.part(tensor) for number in numbers for weight in blocks[number]}
    return list(found.values())


def rank_memory(blocks: Blocks, layout: Layout, rank: int) -> RankMemory:
    """The blocks and the memory of `rank`. A weight that two pipeline stages share lies on both."""
    degrees = layout.degrees
    coords = degrees.coords(rank)
    loads = [sum(distinct(blocks, [number], degrees.tensor)) for number in range(len(blocks))]
    bounds = stage_bounds(loads, degrees.pipeline * layout.virtual_stages, layout.partition)
    stages = tuple(
        tuple(range(bounds[place], bounds[place + 1]))
        for place in range(coords["pipeline"], degrees.pipeline * layout.virtual_stages, degrees.pipeline)
    )
    sizes = distinct(blocks, [number for stage in stages for number in stage], degrees.tensor)
    zero = layout.sharding_stage if degrees.sharding > 1 else 0
    kept = state_bytes(sizes, degrees.sharding, zero, layout.widths)[coords["sharding"]]
    return RankMemory(rank=rank, coords=coords, stages=stages, parameters=sum(sizes), state=kept)


def rank_memories(blocks: Blocks, layout: Layout) -> list[RankMemory]:
    """One of each kind: ranks along data, sequence and tensor hold as much as their first."""
    degrees = layout.degrees
    return [
        rank_memory(blocks, layout, degrees.rank({"pipeline": stage, "sharding": owner}))
        for stage in range(degrees.pipeline)
        for owner in range(degrees.sharding)
    ]
