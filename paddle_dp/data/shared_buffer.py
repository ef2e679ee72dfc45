"""Slots of shared memory that workers fill with stacked samples, so that no sample passes through a pipe.

The memory is anonymous: it leaves no file in /dev/shm and has no file system's size limit.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np

from paddle_dp.batch import Structure, leaves, mapped, structure_of, unflatten
from paddle_dp.data.arrays import Array, Arrays, Pair, describe

_ALIGNED = 64


@dataclass(frozen=True)
class ArraySpec:
    """The dtype and shape of one array of every sample."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def from_array(cls, array: Array) -> ArraySpec:
        return cls(array.dtype.str, tuple(array.shape))

    @property
    def bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class SampleSpec:
    """The dtypes and shapes of every sample (input, target) of a data set; slots have room for these."""

    arrays: tuple[ArraySpec, ...]
    structure: Structure = field(default_factory=lambda: [None, None])
    example: str = "others"  # the name of the sample that they are of

    @classmethod
    def from_pair(cls, pair: Pair) -> SampleSpec:
        return cls(tuple(map(ArraySpec.from_array, leaves(pair))), structure_of(pair))

    def difference(self, pair: Pair) -> str | None:
        """A sample's difference from the spec, "uint8[8, 1], not uint8[8, 3]"; None if there is none."""
        if (structure_of(pair), *map(ArraySpec.from_array, leaves(pair))) == (self.structure, *self.arrays):
            return None
        for structure, spec in zip(pair, unflatten(self.structure, list(self.arrays)), strict=True):
            if (actual := describe(structure)) != (expected := describe(spec)):
                return f"{actual}, not {expected}"
        return "in another byte order"


class Slot(NamedTuple):
    """Room for one batch: indices [rows]; arrays of inputs and targets [rows, ...]."""

    indices: Array
    inputs: Arrays
    targets: Arrays

    def rows(self, first: int, stop: int) -> Slot:
        """A view of some rows."""
        return Slot(*(mapped(lambda array: array[first:stop], structure) for structure in self))

    def fill(self, row: int | slice, inputs: Arrays, targets: Arrays) -> None:
        """Writes one sample into a row, or several samples into a slice of rows."""
        for structure, values in ((self.inputs, inputs), (self.targets, targets)):
            for array, value in zip(leaves(structure), leaves(values), strict=True):
                array[row] = value


class SharedBuffer:
    """`slots` slots of `rows` samples each, shared with every process that is forked later."""

    def __init__(self, spec: SampleSpec, rows: int, slots: int):
        self.spec = spec
        array_specs = (ArraySpec("<i8", ()), *spec.arrays)
        sizes = [-(-rows * array_spec.bytes // _ALIGNED) * _ALIGNED for array_spec in array_specs]
        memory = mmap.mmap(-1, max(slots * sum(sizes), 1))
        self.slots: list[Slot] = []
        offset = 0
        for _ in range(slots):
            arrays: list[Array] = []
            for array_spec, size in zip(array_specs, sizes, strict=True):
                arrays.append(np.ndarray((rows, *array_spec.shape), array_spec.dtype, memory, offset))
                offset += size
            self.slots.append(Slot(arrays[0], *unflatten(spec.structure, arrays[1:])))
