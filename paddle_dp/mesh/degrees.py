"""Computes the size of each mesh axis and each rank's coordinates: arithmetic, without processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from math import prod

from paddle_dp.text import plural

# Outermost first, as fleet numbers ranks: neighbouring ranks are on one tensor axis, which communicates most.
AXES = ("data", "pipeline", "sharding", "sequence", "tensor")

# The same axes by the work of their ranks. A new axis is in one of the first two; docs/map.md lists its other files.
SAMPLE_AXES = ("data", "sharding")  # ranks read different samples
MODEL_AXES = ("pipeline", "sequence", "tensor")  # ranks work on the same samples
# A parameter's gradient is the sum of the gradients of the ranks along these.
GRADIENT_AXES = ("data", "sharding", "sequence")
REPLICA_AXES = (
    "data",
    "sequence",
)  # axes along which ranks update the same parameters, also under ZeRO

# Pictures explain an axis with these.
AXIS_ROLES = {
    "data": "read different samples",
    "pipeline": "hold different layers, one after another",
    "sharding": "read different samples, and each keeps a part of the optimizer's state",
    "sequence": "hold different tokens of the same texts",
    "tensor": "hold slices of the same layers",
    "servers": "read nothing, and update a part of the parameters each",
}


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
        split = [f"{axis} {self[axis]}" for axis in AXES if self[axis] > 1]
        if self.servers:
            return f"{plural(self.servers, 'server')}, {plural(self.dp_size, 'worker')}"
        return " × ".join(split) or "one process"

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
        if self.servers:
            coords["server"] = rank if rank < self.servers else -1
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
        if rank < self.servers:
            return [rank]
        coords = self.coords(rank)
        ranges = [range(self[axis]) if axis in axes else (coords[axis],) for axis in AXES]
        return [self.rank(dict(zip(AXES, position, strict=True))) for position in product(*ranges)]

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Returns all groups along these axes, in order; each rank is in one of them."""
        return sorted({tuple(self.group(rank, *axes)) for rank in range(self.ranks)})

    def dp_rank(self, rank: int) -> int:
        """Returns the index of the share of the data that `rank` reads; −1 for a server."""
        if rank < self.servers:
            return -1
        coords, share = self.coords(rank), 0
        for axis in SAMPLE_AXES:
            share = share * self[axis] + coords[axis]
        return share

    def role(self, rank: int) -> str:
        """Returns "server 1" or "worker 0" if there are servers, else ""."""
        if not self.servers:
            return ""
        return f"server {rank}" if rank < self.servers else f"worker {rank - self.servers}"

    def as_dict(self) -> dict[str, int]:
        """Returns the sizes by axis, and the number of servers if there are any."""
        return {name: size for name, size in asdict(self).items() if name in AXES or size}
