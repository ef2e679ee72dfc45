"""Shards, the boxes of tensors that ranks save, and their assembly into the boxes that another layout reads.

Each rank's `rank-….json` has the index of its shards, under the key `pieces` (file version 1).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import read_bytes
from paddle_dp.checkpoint.manifest import index_name
from paddle_dp.errors import CheckpointError

Ints = tuple[int, ...]
Dims = Sequence[int] | None
"""A box's offset or shape, in every dim; None: the whole tensor's."""

# A dtype's name in Paddle, in a safetensors file, and in little-endian NumPy.
# NumPy has no bfloat16, so its bits are kept as uint16; only the name distinguishes them.
DTYPES: dict[str, tuple[str, str]] = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"),
    "int64": ("I64", "<i8"), "int32": ("I32", "<i4"), "int16": ("I16", "<i2"), "int8": ("I8", "<i1"),
    "uint64": ("U64", "<u8"), "uint32": ("U32", "<u4"), "uint16": ("U16", "<u2"), "uint8": ("U8", "<u1"),
    "bool": ("BOOL", "|b1"), "complex64": ("C64", "<c8"),
}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: its offset and its length in every dim."""

    offset: Ints
    shape: Ints

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> Ints:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """The intersection, or None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(stop - o for stop, o in zip(map(min, self.stop, other.stop), start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def without(self, other: Box) -> list[Box]:
        """This box without `other`, as boxes that do not overlap (at most two per dim)."""
        hole = self.overlap(other)
        if hole is None:
            return [self] if self.size else []
        left, start, stop = [], list(self.offset), list(self.stop)
        for dim, (low, high) in enumerate(zip(hole.offset, hole.stop, strict=True)):
            for a, b in ((start[dim], low), (high, stop[dim])):
                if a < b:
                    first, last = [*start], [*stop]
                    first[dim], last[dim] = a, b
                    left.append(_between(first, last))
            start[dim], stop[dim] = low, high
        return left

    def inside(self, other: Box) -> tuple[slice, ...]:
        """The slices of this box in an array that holds `other`."""
        starts = [a - b for a, b in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of this box in the whole tensor."""
        return tuple(slice(a, b) for a, b in zip(self.offset, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"


def _between(start: Sequence[int], stop: Sequence[int]) -> Box:
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))


def full_box(shape: Iterable[int]) -> Box:
    """The box of a whole tensor of this shape."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def assemble(target: Box, boxes: Iterable[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Covers `target` with parts of `boxes`, each element once. Returns [(index of the box, part)] and the missing
    parts."""
    missing = [target] if target.size else []
    takes: list[tuple[int, Box]] = []
    for number, box in enumerate(boxes):
        if not missing:
            break
        takes += [(number, common) for gap in missing if (common := gap.overlap(box))]
        missing = [piece for gap in missing for piece in gap.without(box)]
    return takes, missing


@dataclass(frozen=True, eq=False)
class TensorShard:
    """A box of a tensor of shape `global_shape`: `array`, which starts at `offset`.

    `dtype` is Paddle's name, by default the array's. bfloat16 is the uint16 array of its bits, as
    `paddle.Tensor.numpy()` returns it, with dtype="bfloat16".
    """

    name: str
    global_shape: Ints
    offset: Ints
    array: np.ndarray = field(repr=False)
    dtype: str = ""

    def __post_init__(self) -> None:
        for attribute, value in (("global_shape", self.global_shape), ("offset", self.offset)):
            object.__setattr__(self, attribute, tuple(map(int, value)))
        object.__setattr__(self, "dtype", self.dtype or self.array.dtype.name)
        if self.dtype not in DTYPES or self.array.dtype != np.dtype(DTYPES[self.dtype][1]):
            raise ValueError(
                f"{self.name}: a numpy array of {self.array.dtype} cannot be saved as {self.dtype}"
            )
        if not len(self.global_shape) == len(self.offset) == self.array.ndim:
            raise ValueError(
                f"{self.name}: global shape {self.global_shape}, offset {self.offset}, shard {self.array.shape}"
            )
        if any(
            o < 0 or stop > n
            for o, stop, n in zip(self.offset, self.box.stop, self.global_shape, strict=True)
        ):
            raise ValueError(
                f"{self.name}: shard {self.box} lies outside the whole tensor {self.global_shape}"
            )

    @classmethod
    def full(cls, name: str, array: Any, dtype: str = "") -> TensorShard:
        """The shard that is the whole tensor."""
        array = np.asarray(array)
        return cls(name, array.shape, (0,) * array.ndim, array, dtype)

    @property
    def box(self) -> Box:
        return Box(self.offset, self.array.shape)


@dataclass(frozen=True)
class ShardInfo:
    """One saved shard: its box of the tensor and its key in the file of `rank`. `sum`: its contribution to the tensor's
    sum (checkpoint.digest)."""

    rank: int
    key: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    sum: int


def index_of(shards: Iterable[TensorShard]) -> tuple[dict[str, TensorShard], dict[str, Any]]:
    """A rank's shards by their key in its file, and their index as JSON values. A whole tensor's key is its name."""
    keyed = {}
    for shard in shards:
        is_whole = shard.box == full_box(shard.global_shape)
        key = shard.name if is_whole else f"{shard.name}@{','.join(map(str, shard.offset))}"
        if key in keyed:
            raise CheckpointError(f"two shards of {shard.name} {shard.box} on one rank")
        keyed[key] = shard
    return keyed, {key: _json(shard) for key, shard in keyed.items()}


def _json(shard: TensorShard) -> dict[str, Any]:
    offset, size = list(shard.offset), list(shard.array.shape)
    return {
        "name": shard.name,
        "dtype": shard.dtype,
        "shape": list(shard.global_shape),
        "offset": offset,
        "size": size,
    }


def read_index(folder: Path, rank: int) -> list[ShardInfo]:
    """The shards that a rank saved. Raises ValueError or KeyError for an invalid file."""
    pieces = json_codec.mapping(read_rank_file(folder, rank)["pieces"], "pieces")
    return [_info(rank, key, json_codec.mapping(value, key)) for key, value in pieces.items()]


def read_rank_file(folder: Path, rank: int) -> dict[str, Any]:
    """The JSON file that a rank wrote next to its tensors. Raises ValueError for an invalid file."""
    content = read_bytes(folder / index_name(rank), json_codec.MOST_BYTES)
    return json_codec.mapping(json_codec.decode(content), index_name(rank))


def _info(rank: int, key: str, value: dict[str, Any]) -> ShardInfo:
    shape, offset, size = (
        json_codec.naturals(value[entry], f"{key}: {entry}") for entry in ("shape", "offset", "size")
    )
    if not len(shape) == len(offset) == len(size) or any(
        map(operator.gt, map(operator.add, offset, size), shape)
    ):
        raise ValueError(f"{key} has an impossible shard")
    dtype, name = value["dtype"], value["name"]
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{key} is of an unknown dtype {str(dtype)[:30]}")
    return ShardInfo(rank, key, name, dtype, shape, Box(offset, size), int(value["sum"], 16))


def by_name(indexes: Iterable[Iterable[ShardInfo]]) -> dict[str, list[ShardInfo]]:
    """All ranks' shards by tensor."""
    names: dict[str, list[ShardInfo]] = {}
    for info in (info for index in indexes for info in index):
        names.setdefault(info.name, []).append(info)
    return names


def check_complete(indexes: Iterable[Iterable[ShardInfo]]) -> dict[str, list[ShardInfo]]:
    """The shards by tensor. Raises CheckpointError if ranks disagree about a tensor's shape or dtype, or a part of it
    is missing."""
    names = by_name(indexes)
    for name, infos in names.items():
        first = infos[0]
        for info in infos:
            if (info.global_shape, info.dtype) != (first.global_shape, first.dtype):
                raise CheckpointError(
                    f"{name} is {first.dtype} {first.global_shape} on rank {first.rank}, "
                    f"{info.dtype} {info.global_shape} on rank {info.rank}"
                )
        _, missing = assemble(full_box(first.global_shape), [info.box for info in infos])
        if missing:
            raise CheckpointError(f"no rank holds {name}{missing[0]} of {first.global_shape}")
    return names
