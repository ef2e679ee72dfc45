"""The floors: the distances of one process's runs with noise from its run without noise.

A run with noise is not stored. Each quantity is compared at once with the run without noise, which is on the disk, and
only the largest distance is kept by key: of each element, in float32, and of the 2-norm.
"""

from __future__ import annotations

import numpy as np

from paddle_dp.checkpoint import TensorShard
from paddle_dp.proof.noise import is_rounding
from paddle_dp.proof.store import chunks
from paddle_dp.proof.trace_files import Writer


class NoRounding(Exception):  # noqa: N818 - no error: it ends a run with noise that is not usable
    """A run with noise whose first `loss` differs by more than rounding can explain."""

    def __init__(self, loss: float):
        self.loss = loss
        super().__init__(loss)


class Floors:
    """The floors of one run. Its sheet holds the quantities without noise, and gets the floors as the group "noise"."""

    def __init__(self, sheet: Writer):
        self._store = sheet.store
        self.norms: dict[str, float] = {}

    def distance(self, name: str, array: np.ndarray) -> tuple[float, np.ndarray]:
        """The 2-norm of `array` minus the sheet's `name`, and its absolute values, flat, in float32."""
        flat, squares = array.reshape(-1), 0.0
        most = np.empty(flat.size, "float32")
        for start, stop in chunks(flat.size):
            apart = np.abs(flat[start:stop].astype("float64") - self._store.read(name, start, stop))
            most[start:stop] = apart
            squares += float(apart.dot(apart))
        return float(np.sqrt(squares)), most

    def fold(self, number: str, shape: tuple[int, ...], norm: float, most: np.ndarray) -> None:
        """Adds one distance: keeps the larger."""
        self.norms[number] = max(self.norms.get(number, 0.0), norm)
        name = f"noise|{number}"
        if name not in self._store:
            self._store.put(name, most.reshape(shape))
            return
        for start, stop in chunks(most.size):
            before = self._store.read(name, start, stop)
            self._store.change(name, start, np.maximum(before, most[start:stop]))

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the run without noise has this quantity, in this shape."""
        return name in self._store and self._store.shape(name) == shape


class Fold:
    """Adds the quantities of one run with noise to the floors.

    Distances are held back until the loss of its first update shows whether they are rounding; if not, none of them
    counts.
    """

    def __init__(self, floors: Floors, dtype: str, loss: float, judged: bool):
        """`loss`: that of the first update without noise; `judged`: the float64 runs have shown what is rounding."""
        self._floors, self._dtype, self._loss = floors, dtype, loss
        self._judged = judged
        self._waiting: dict[str, tuple[tuple[int, ...], float, np.ndarray]] = {}

    def judge(self, loss: float) -> None:
        """Judges the run by the loss of its first update; later calls do nothing. Raises NoRounding."""
        if self._judged:
            return
        if not is_rounding(self._dtype, self._loss, loss):
            raise NoRounding(loss)
        self._judged = True
        for number, distance in self._waiting.items():
            self._floors.fold(number, *distance)
        self._waiting.clear()

    def put(self, number: str, shard: TensorShard) -> None:
        """Adds a quantity of the run."""
        self._take("shard", number, shard.array)

    def outputs(self, outputs: dict[str, np.ndarray]) -> None:
        """Adds the outputs of the run's layers."""
        for number, seen in outputs.items():
            self._take("output", number, seen)

    def _take(self, group: str, number: str, array: np.ndarray) -> None:
        name = f"{group}|{number}"
        if not self._floors.has(name, array.shape):
            return
        norm, most = self._floors.distance(name, array)
        if self._judged:
            self._floors.fold(number, array.shape, norm, most)
        else:
            self._waiting[number] = (array.shape, norm, most)
