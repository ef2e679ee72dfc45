"""How many ways each axis splits the work, and each rank's coordinates: arithmetic, without processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod

# Outermost first, as fleet numbers ranks: neighbouring ranks are on one tensor axis, which communicates most.
AXES = ("data", "pipeline", "sharding", "sequence", "tensor")


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The size of each axis of the mesh; their product is the number of ranks.

    `data` and `sharding` ranks read different samples; ranks along the other axes work on the same ones.
    """

    data: int = 1
    pipeline: int = 1
    sharding: int = 1
    sequence: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self[axis] < 1:
                raise ValueError(f"{axis}: {self[axis]} is less than 1")

    def __getitem__(self, axis: str) -> int:
        return getattr(self, axis)

    def __str__(self) -> str:
        split = [f"{axis} {self[axis]}" for axis in AXES if self[axis] > 1]
        return " × ".join(split) or "one process"

    @property
    def ranks(self) -> int:
        return prod(self[axis] for axis in AXES)

    @property
    def dp_size(self) -> int:
        """How many different shares of the data there are."""
        return self.data * self.sharding

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis."""
        coords = dict.fromkeys(AXES, 0)
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, self[axis])
        return coords

    def rank(self, coords: dict[str, int]) -> int:
        """The rank at `coords`; axes left out are 0."""
        number = 0
        for axis in AXES:
            number = number * self[axis] + coords.get(axis, 0)
        return number

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from `rank` on `axis` only, in order, including itself."""
        coords = self.coords(rank)
        return [self.rank({**coords, axis: place}) for place in range(self[axis])]

    def dp_rank(self, rank: int) -> int:
        """Which share of the data `rank` reads."""
        coords = self.coords(rank)
        return coords["data"] * self.sharding + coords["sharding"]

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
