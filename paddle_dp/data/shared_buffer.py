"""Slots of shared memory that workers fill with stacked samples, so that no sample passes through a pipe.

The memory is anonymous: there is no file in /dev/shm to be left behind, and no size limit of a file system.
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
    """dtype and shape of one part of every sample."""

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
    """dtypes and shapes of every sample of a data set; a slot has room for these."""

    input: ArraySpec
    target: ArraySpec

    @classmethod
    def of(cls, pair: Pair) -> SampleSpec:
        return cls(ArraySpec.of(pair[0]), ArraySpec.of(pair[1]))

    def difference(self, pair: Pair) -> str | None:
        """How a sample differs from the spec, «uint8[8, 1], not uint8[8, 3]»; None if it does not."""
        for array, spec in zip(pair, (self.input, self.target), strict=True):
            if ArraySpec.of(array) != spec:
                return f"{describe(array)}, not {spec}"
        return None


class Slot(NamedTuple):
    """Room for one batch: indices [rows], inputs [rows, ...], targets [rows, ...]."""

    indices: Array
    inputs: Array
    targets: Array


class SharedBuffer:
    """`slots` slots of `rows` samples each, shared with every process forked after it was made."""

    def __init__(self, spec: SampleSpec, rows: int, slots: int):
        self.spec = spec
        parts = (ArraySpec("<i8", ()), spec.input, spec.target)
        size = sum(_aligned(rows * part.bytes) for part in parts)
        memory = mmap.mmap(-1, max(slots * size, 1))
        self.slots: list[Slot] = []
        offset = 0
        for _ in range(slots):
            arrays = []
            for part in parts:
                arrays.append(_view(memory, offset, part, rows))
                offset += _aligned(rows * part.bytes)
            self.slots.append(Slot(*arrays))


def _view(memory: mmap.mmap, offset: int, spec: ArraySpec, rows: int) -> Array:
    shape = (rows, *spec.shape)
    flat: np.ndarray[Any, Any] = np.frombuffer(memory, spec.dtype, prod(shape), offset)
    return flat.reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
