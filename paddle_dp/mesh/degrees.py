"""Computes the size of each mesh axis and each rank's coordinates: arithmetic, without processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from math import prod

from paddle_dp.text import plural


@dataclass(frozen=True)
class AxisFacts:
    """`role`: the work of the ranks along an axis, and `colour`: its colour (of `figures.COLOURS`), in pictures. They
    read different samples (`splits_batch`) or work on the same ones; a parameter's gradient is the sum of theirs
    (`sums_gradients`) or not; they update the same parameters, also under ZeRO (`replicates`), or different ones."""

    role: str
    colour: int
    splits_batch: bool = False
    sums_gradients: bool = False
    replicates: bool = False


# Outermost first, as fleet numbers ranks: neighbouring ranks are on one tensor axis, which communicates most. An axis's
# name is also its setting in a recipe's `strategy`. docs/map.md lists the other files of a new axis.
AXIS_FACTS = {
    "data": AxisFacts("read different samples", 0, splits_batch=True, sums_gradients=True, replicates=True),
    "pipeline": AxisFacts("hold different layers, one after another", 1),
    "sharding": AxisFacts(
        "read different samples, and each keeps a part of the optimizer's state", 3,
        splits_batch=True, sums_gradients=True,
    ),
    "sequence": AxisFacts("hold different tokens of the same texts", 2, sums_gradients=True, replicates=True),
    "tensor": AxisFacts("hold slices of the same layers", 4),
}  # fmt: skip
# With the ranks that are on no axis.
RANK_FACTS = {**AXIS_FACTS, "servers": AxisFacts("read nothing, and update a part of the parameters each", 6)}

AXES = tuple(AXIS_FACTS)
SAMPLE_AXES = tuple(axis for axis, facts in AXIS_FACTS.items() if facts.splits_batch)
MODEL_AXES = tuple(axis for axis, facts in AXIS_FACTS.items() if not facts.splits_batch)
GRADIENT_AXES = tuple(axis for axis, facts in AXIS_FACTS.items() if facts.sums_gradients)
REPLICA_AXES = tuple(axis for axis, facts in AXIS_FACTS.items() if facts.replicates)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The size of each axis of the mesh; their product is the number of ranks that compute.

    The first ranks may be `servers`: they read no samples, and each updates a part of the parameters.
    """

    data: int = 1
    pipeline: int = 1
    sharding: int = 1
    sequence: int = 1
    tensor: int = 1
    servers: int = 0

    def __post_init__(self) -> None:
        for axis in AXES:
            if self[axis] < 1:
                raise ValueError(f"{axis}: {self[axis]} is less than 1")

    def __getitem__(self, axis: str) -> int:
        return getattr(self, axis)

    def __str__(self) -> str:
        if self.all_read:
            return " × ".join(f"{axis} {self[axis]}" for axis in self.split_axes) or "one process"
        return f"{plural(self.servers, 'server')}, {self.readers}"

    @cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, outermost first."""
        return tuple(axis for axis in AXES if self[axis] > 1)

    @property
    def ranks(self) -> int:
        return self.servers + prod(self[axis] for axis in AXES)

    @property
    def dp_size(self) -> int:
        """The number of different shares of the data."""
        return prod(self[axis] for axis in SAMPLE_AXES)

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on each axis.

        With servers, "server" is the rank's index among them, or −1 for a rank that computes; a server has 0 on every
        axis.
        """
        coords = dict.fromkeys(AXES, 0)
        if not self.all_read:
            coords["server"] = -1 if self.reads(rank) else rank
            rank = max(rank - self.servers, 0)
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self[axis])
        return coords

    def rank(self, coords: dict[str, int]) -> int:
        """Returns the rank at `coords`; omitted axes are 0."""
        number = 0
        for axis in AXES:
            number = number * self[axis] + coords.get(axis, 0)
        server = coords.get("server", -1)
        return number + self.servers if server < 0 else server

    def group(self, rank: int, *axes: str) -> list[int]:
        """Returns the ranks that differ from `rank` only on these axes, in order, with itself; a server is alone."""
        if not self.reads(rank):
            return [rank]
        coords = self.coords(rank)
        ranges = [range(self[axis]) if axis in axes else (coords[axis],) for axis in AXES]
        return [self.rank(dict(zip(AXES, position, strict=True))) for position in product(*ranges)]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns all groups along these axes, in order; each rank is in one of them."""
        return sorted({tuple(self.group(rank, *axes)) for rank in range(self.ranks)})

    def dp_rank(self, rank: int) -> int:
        """Returns the index of the share of the data that `rank` reads; −1 for a server."""
        if not self.reads(rank):
            return -1
        coords, share = self.coords(rank), 0
        for axis in SAMPLE_AXES:
            share = share * self[axis] + coords[axis]
        return share

    def reads(self, rank: int) -> bool:
        """Whether `rank` reads samples and computes, which a server does not."""
        return rank >= self.servers

    @property
    def all_read(self) -> bool:
        """Whether every rank reads samples and computes."""
        return self.reads(0)

    @property
    def facts(self) -> dict[str, AxisFacts]:
        """The facts of each split axis, and of the servers, if there are any."""
        return {name: RANK_FACTS[name] for name in (*self.split_axes, *["servers"] * bool(self.servers))}

    @property
    def readers(self) -> str:
        """ "4 ranks", "2 groups of ranks", or "3 workers": they read different samples."""
        noun = "rank" if self.dp_size == self.ranks else "group" if self.all_read else "worker"
        return plural(self.dp_size, noun) + " of ranks" * (noun == "group")

    def role(self, rank: int) -> str:
        """Returns "server 1" or "worker 0" if there are servers, else ""."""
        if self.all_read:
            return ""
        return f"worker {rank - self.servers}" if self.reads(rank) else f"server {rank}"

    def as_dict(self) -> dict[str, int]:
        """Returns the sizes by axis, and the number of servers if there are any."""
        return {name: size for name, size in asdict(self).items() if name in AXES or size}
