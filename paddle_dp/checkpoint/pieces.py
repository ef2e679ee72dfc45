"""Box arithmetic: how the pieces that some layout saved make up the box that another layout wants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Ints = tuple[int, ...]

# How a dtype is called in paddle, in a safetensors file, and as little-endian numpy.
# numpy has no bfloat16: its bits travel as uint16, and the label says what they are.
DTYPES: dict[str, tuple[str, str]] = {
    "float64": ("F64", "<f8"), "float32": ("F32", "<f4"), "float16": ("F16", "<f2"), "bfloat16": ("BF16", "<u2"),
    "int64": ("I64", "<i8"), "int32": ("I32", "<i4"), "int16": ("I16", "<i2"), "int8": ("I8", "<i1"),
    "uint64": ("U64", "<u8"), "uint32": ("U32", "<u4"), "uint16": ("U16", "<u2"), "uint8": ("U8", "<u1"),
    "bool": ("BOOL", "|b1"), "complex64": ("C64", "<c8"),
}  # fmt: skip


@dataclass(frozen=True)
class Box:
    """A rectangle of a tensor: where it starts and how far it goes along every dim."""

    offset: Ints
    shape: Ints

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> Ints:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """What both boxes hold, or None when they hold nothing in common."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(stop - o for stop, o in zip(map(min, self.stop, other.stop), start, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def without(self, other: Box) -> list[Box]:
        """This box less `other`, as boxes that do not overlap (at most two a dim)."""
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
        """The slices that cut this box out of an array that holds `other`."""
        starts = [a - b for a, b in zip(self.offset, other.offset, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(starts, self.shape, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"


def _between(start: Sequence[int], stop: Sequence[int]) -> Box:
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))


def whole(shape: Iterable[int]) -> Box:
    """The box that is the whole of a tensor of this shape."""
    shape = tuple(shape)
    return Box((0,) * len(shape), shape)


def assemble(target: Box, boxes: Iterable[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Which part of which box to take, each element once; and the parts of `target` that no box holds."""
    missing = [target] if target.size else []
    takes: list[tuple[int, Box]] = []
    for number, box in enumerate(boxes):
        if not missing:
            break
        takes += [(number, common) for gap in missing if (common := gap.overlap(box))]
        missing = [part for gap in missing for part in gap.without(box)]
    return takes, missing


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a tensor that is `shape` as a whole: `array` starts at `offset` (default: the beginning).

    `dtype` is paddle's word; left out, it is the array's. bfloat16 comes as the uint16 array of its bits,
    as `paddle.Tensor.numpy()` gives it, with dtype="bfloat16".
    """

    name: str
    shape: Ints
    offset: Ints
    array: np.ndarray = field(repr=False)
    dtype: str = ""

    def __post_init__(self) -> None:
        for word, value in (("shape", self.shape), ("offset", self.offset)):
            object.__setattr__(self, word, tuple(map(int, value)))
        object.__setattr__(self, "dtype", self.dtype or self.array.dtype.name)
        if self.dtype not in DTYPES or self.array.dtype != np.dtype(DTYPES[self.dtype][1]):
            raise ValueError(
                f"{self.name}: a numpy array of {self.array.dtype} cannot be saved as {self.dtype}"
            )
        if not len(self.shape) == len(self.offset) == self.array.ndim:
            raise ValueError(
                f"{self.name}: shape {self.shape}, offset {self.offset}, piece {self.array.shape}"
            )
        if any(o < 0 or stop > n for o, stop, n in zip(self.offset, self.box.stop, self.shape, strict=True)):
            raise ValueError(f"{self.name}: piece {self.box} lies outside the whole tensor {self.shape}")

    @classmethod
    def whole(cls, name: str, array: Any, dtype: str = "") -> Piece:
        """The piece that is the whole tensor."""
        array = np.asarray(array)
        return cls(name, array.shape, (0,) * array.ndim, array, dtype)

    @property
    def box(self) -> Box:
        return Box(self.offset, self.array.shape)
