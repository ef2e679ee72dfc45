"""Slots of shared memory in which workers lay samples down already stacked, so that none travels through a pipe.

The memory is anonymous: it has no name in /dev/shm that could be left behind, and no size limit of a file system.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from paddle_dp.data.sample import Array, Pair, describe

_ALIGNED = 64


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of one part of every sample."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Array) -> ArraySpec:
        return cls(array.dtype.str, tuple(array.shape))

    @property
    def bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)

    def __str__(self) -> str:
        return f"{np.dtype(self.dtype)}{list(self.shape)}"


@dataclass(frozen=True)
class SampleSpec:
    """What every sample of a data set looks like, so that their batches fit into slots."""

    input: ArraySpec
    target: ArraySpec

    @classmethod
    def of(cls, pair: Pair) -> SampleSpec:
        return cls(ArraySpec.of(pair[0]), ArraySpec.of(pair[1]))

    def difference(self, pair: Pair) -> str | None:
        """How a sample differs from all others: «uint8[8, 1], not uint8[8, 3]»; None when it does not."""
        for array, like in zip(pair, (self.input, self.target), strict=True):
            if ArraySpec.of(array) != like:
                return f"{describe(array)}, not {like}"
        return None


class Slot(NamedTuple):
    """Room for one batch: indices [rows], inputs [rows, ...], targets [rows, ...]."""

    indices: Array
    inputs: Array
    targets: Array


class SharedBuffer:
    """`slots` slots of `rows` samples each, shared with every process forked after it was made."""

    def __init__(self, layout: SampleSpec, rows: int, slots: int):
        self.layout = layout
        parts = (ArraySpec("<i8", ()), layout.input, layout.target)
        size = sum(_aligned(rows * like.bytes) for like in parts)
        memory = mmap.mmap(-1, max(slots * size, 1))
        self.slots: list[Slot] = []
        place = 0
        for _ in range(slots):
            arrays = []
            for like in parts:
                arrays.append(_view(memory, place, like, rows))
                place += _aligned(rows * like.bytes)
            self.slots.append(Slot(*arrays))


def _view(memory: mmap.mmap, place: int, like: ArraySpec, rows: int) -> Array:
    shape = (rows, *like.shape)
    flat: np.ndarray[Any, Any] = np.frombuffer(memory, like.dtype, prod(shape), place)
    return flat.reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
