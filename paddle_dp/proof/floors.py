"""How far one process's runs with noise are from its run without: folded, number by number, while they run.

A run with noise keeps nothing: what it shows is laid beside the run without, which lies on the disk, and only the
distance stays: by key the most of each element, in float32, and of the 2-norm.
"""

from __future__ import annotations

import numpy as np

from paddle_dp.checkpoint import TensorShard
from paddle_dp.proof.noise import is_rounding
from paddle_dp.proof.sheets import Writer
from paddle_dp.proof.store import stretches


class NoRounding(Exception):  # noqa: N818 - no error: it ends a run with noise that says nothing
    """A run with noise whose first `loss` is further off than rounding can lead."""

    def __init__(self, loss: float):
        self.loss = loss
        super().__init__(loss)


class Floors:
    """The floors of one run, whose sheet has what it showed without noise, and gets the group "noise"."""

    def __init__(self, sheet: Writer):
        self._store = sheet.store
        self.norms: dict[str, float] = {}

    def distance(self, name: str, array: np.ndarray) -> tuple[float, np.ndarray]:
        """The 2-norm of array - what the sheet has as `name`, and each element's absolute value, flat, in float32."""
        flat, squares = array.reshape(-1), 0.0
        most = np.empty(flat.size, "float32")
        for start, stop in stretches(flat.size):
            apart = np.abs(flat[start:stop].astype("float64") - self._store.read(name, start, stop))
            most[start:stop] = apart
            squares += float(apart.dot(apart))
        return float(np.sqrt(squares)), most

    def fold(self, number: str, shape: tuple[int, ...], norm: float, most: np.ndarray) -> None:
        """Takes one distance in."""
        self.norms[number] = max(self.norms.get(number, 0.0), norm)
        name = f"noise|{number}"
        if name not in self._store:
            self._store.put(name, most.reshape(shape))
            return
        for start, stop in stretches(most.size):
            before = self._store.read(name, start, stop)
            self._store.change(name, start, np.maximum(before, most[start:stop]))

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the run without noise showed this, and as large."""
        return name in self._store and self._store.shape(name) == shape


class Fold:
    """Takes what one run with noise shows into the floors.

    Until its first loss has told whether this is rounding, distances wait; if it is not, none of them counts.
    """

    def __init__(self, floors: Floors, dtype: str, loss: float, judged: bool):
        """`loss` is the first one without noise; `judged`: float64 has told already what is rounding."""
        self._floors, self._dtype, self._loss = floors, dtype, loss
        self._judged = judged
        self._waiting: dict[str, tuple[tuple[int, ...], float, np.ndarray]] = {}

    def judge(self, loss: float) -> None:
        """Hears the run's first loss; all later ones may be told, too. Raises NoRounding."""
        if self._judged:
            return
        if not is_rounding(self._dtype, self._loss, loss):
            raise NoRounding(loss)
        self._judged = True
        for number, distance in self._waiting.items():
            self._floors.fold(number, *distance)
        self._waiting.clear()

    def put(self, number: str, shard: TensorShard) -> None:
        """A quantity that the run shows."""
        self._take("shard", number, shard.array)

    def outputs(self, outputs: dict[str, np.ndarray]) -> None:
        """What the run's layers gave."""
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
