"""A file of arrays, written one by one and read in chunks, so that a proof's record need not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 2**22  # elements of an array in memory at once: 32 MB in float64


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each chunk of `size` elements."""
    return ((start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


class Store:
    """A file of arrays by name. Arrays are appended, and may be changed in place."""

    def __init__(self, path: Path, index: Mapping[str, Any] | None = None):
        """Opens a file for reading, with its writer's `index`; without it, a new file for writing and reading."""
        self.index: dict[str, Any] = dict(index or {})  # name: dtype, shape, the byte where it begins
        self._file: BufferedRandom | BufferedReader = path.open("w+b") if index is None else path.open("rb")
        self._end = 0

    def __contains__(self, name: str) -> bool:
        return name in self.index

    def close(self) -> None:
        self._file.close()

    def put(self, name: str, array: np.ndarray) -> None:
        """Appends an array."""
        array = np.asarray(array)
        self.index[name] = [array.dtype.str, list(array.shape), self._end]
        self._write(self._end, array.reshape(-1))
        self._end += array.nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.index[name][1])

    def get(self, name: str) -> np.ndarray:
        """The whole array."""
        shape = self.shape(name)
        return self.read(name, 0, math.prod(shape)).reshape(shape)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """The elements `start` to `stop` of the array, flat. Raises EOFError for a file that was cut off."""
        dtype, _, begins = self.index[name]
        elements = np.empty(stop - start, dtype)
        if elements.size:
            self._file.seek(begins + start * elements.itemsize)
            if self._file.readinto(elements.data.cast("B")) != elements.nbytes:
                raise EOFError(f"{self._file.name} ends within {name}: was the disk full?")
        return elements

    def change(self, name: str, start: int, elements: np.ndarray) -> None:
        """Overwrites elements of the array, flat, from `start` on."""
        dtype, _, begins = self.index[name]
        elements = elements.astype(dtype, copy=False)
        self._write(begins + start * elements.itemsize, elements)

    def _write(self, offset: int, flat: np.ndarray) -> None:
        if flat.size:
            self._file.seek(offset)
            self._file.write(np.ascontiguousarray(flat).data.cast("B"))
