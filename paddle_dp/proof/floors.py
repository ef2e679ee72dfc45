"""The floors: the distances of one process's runs with noise from its run without noise.

A run with noise is not stored. Each quantity is compared at once with the run without noise, on the disk. Only the
largest distance per key is kept: of each element, in float32, and of the 2-norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paddle_dp.checkpoint import TensorShard
from paddle_dp.proof.store import chunks
from paddle_dp.proof.trace_files import Writer


class Floors:
    """The floors of one run. Its sheet holds the quantities without noise, and gets the floors as the group "noise"."""

    def __init__(self, sheet: Writer):
        self._store = sheet.store
        self.norms: dict[str, float] = {}

    def put(self, number: str, shard: TensorShard) -> None:
        """Adds a quantity of a run with noise."""
        self._fold("shard", number, shard.array)

    def outputs(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Adds the outputs of the layers of a run with noise."""
        for number, sums in outputs.items():
            self._fold("output", number, sums)

    def _distance(self, name: str, array: np.ndarray) -> tuple[float, np.ndarray]:
        """The 2-norm of `array` minus the sheet's `name`, and its absolute values, flat, in float32."""
        flat, squares = array.reshape(-1), 0.0
        most = np.empty(flat.size, "float32")
        for start, stop in chunks(flat.size):
            differences = np.abs(flat[start:stop].astype("float64") - self._store.read(name, start, stop))
            most[start:stop] = differences
            squares += float(differences.dot(differences))
        return float(np.sqrt(squares)), most

    def _fold(self, group: str, number: str, array: np.ndarray) -> None:
        """Keeps the larger distance. Skips a quantity without a plain one of its shape."""
        base = f"{group}|{number}"
        if base not in self._store or self._store.shape(base) != array.shape:
            return
        norm, most = self._distance(base, array)
        self.norms[number] = max(self.norms.get(number, 0.0), norm)
        name = f"noise|{number}"
        if name not in self._store:
            self._store.put(name, most.reshape(array.shape))
            return
        for start, stop in chunks(most.size):
            before = self._store.read(name, start, stop)
            self._store.change(name, start, np.maximum(before, most[start:stop]))
