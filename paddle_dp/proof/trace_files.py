"""The files of a side: one sheet per trace and rank, with arrays by key (.bin) and facts (.json).

A key is "kind|step|name": gradient|1|blocks.0.norm1.weight. Ranks write them; they are read without paddle. Arrays are
written one by one and read in chunks, so that a proof's record need not fit into memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_dp.checkpoint.shards import Box, TensorShard, assemble, full_box

Arrays = Mapping[str, np.ndarray]
Row = dict[str, Any]  # the numbers of a step on one side, by name
# The kinds that one process computes again from the ranks' gradients (proof.replay).
REPLAYED = ("update", "state")
SCORE = "score "  # begins the names of scores in a step's row
MODEL_LAYER = "the model"  # the name of the layer that is the whole model


class Key(NamedTuple):
    """A quantity of a side: its kind, its step (from 1; 0: before the first), its tensor in the model."""

    kind: str
    step: int
    name: str

    @classmethod
    def read(cls, text: str) -> Key:
        kind, step, name = text.split("|", 2)
        return cls(kind, int(step), name)


def key_of(kind: str, step: int, name: str) -> str:
    """The key of the array of a quantity."""
    return f"{kind}|{step}|{name}"


def numbers_of(row: Row) -> list[str]:
    """The names of the compared numbers in a step's row: `loss`, `gradient_norm`, `score NAME`; [] if not read."""
    names = [name for name in row if name in ("loss", "gradient_norm") or name.startswith(SCORE)]
    return [name for name in names if row[name] is not None]


def number_key(name: str, step: int) -> str:
    """The key of a number of a step's row."""
    if name.startswith(SCORE):
        return key_of("score", step, name.removeprefix(SCORE))
    return key_of(name.replace("_", " "), step, "")


CHUNK = 2**22  # elements of an array in memory at once: 32 MB in float64


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each chunk of `size` elements."""
    return ((start, min(start + CHUNK, size)) for start in range(0, size, CHUNK))


class ArrayStore:
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


class SheetWriter:
    """Writes a rank's sheet of a trace; arrays go to the disk at once.

    Use it in a `with` statement: after an error the file is removed.
    """

    def __init__(self, folder: Path, trace: str, rank: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{trace}.{rank}.json"
        self._cut: dict[str, Any] = {}
        self.store = ArrayStore(self._path.with_suffix(".bin"))
        self.numbers = 0  # in all shards

    def __enter__(self) -> SheetWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.store.close()
        if kind is not None:
            self._path.with_suffix(".bin").unlink()

    def put(self, key: str, shard: TensorShard) -> None:
        """Writes a shard of a whole tensor."""
        if shard.global_shape != shard.array.shape:
            self._cut[key] = [list(shard.global_shape), list(shard.offset)]
        self.numbers += shard.array.size
        self.store.put(f"shard|{key}", shard.array)

    def group(self, name: str, arrays: Arrays) -> None:
        """Writes further arrays by key."""
        for key, array in arrays.items():
            self.store.put(f"{name}|{key}", array)

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Writes the facts and the index of the arrays, as JSON."""
        self._path.write_text(json.dumps({**facts, "cut": self._cut, "arrays": self.store.index}))


class NoiseFloors:
    """The largest distance of any run with noise from the plain run, of each element and of the 2-norm (`norms`).

    The sheet holds the plain run's quantities, and gets the distances of their elements as the group "noise".
    """

    def __init__(self, sheet: SheetWriter):
        self._store = sheet.store
        self.norms: dict[str, float] = {}

    def put(self, key: str, shard: TensorShard) -> None:
        """Adds a quantity of a run with noise."""
        self._fold("shard", key, shard.array)

    def outputs(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Adds the outputs of the layers of a run with noise."""
        for key, sums in outputs.items():
            self._fold("output", key, sums)

    def _fold(self, group: str, key: str, array: np.ndarray) -> None:
        """Keeps the larger distance of each element. Skips a quantity without a plain one of its shape."""
        store, base, name = self._store, f"{group}|{key}", f"noise|{key}"
        if base not in store or store.shape(base) != array.shape:
            return
        if name not in store:
            store.put(name, np.zeros(array.shape, "float32"))
        flat, squares = array.reshape(-1), 0.0
        for start, stop in chunks(flat.size):
            noisy, plain = flat[start:stop].astype("float64"), store.read(base, start, stop)
            with np.errstate(invalid="ignore"):
                distances = np.abs(noisy - plain)
            if not np.isfinite(distances).all():  # the same infinity, or NaN on both sides, is equal
                distances[(noisy == plain) | (np.isnan(noisy) & np.isnan(plain))] = 0.0
            squares += float(distances.dot(distances))
            store.change(name, start, np.maximum(store.read(name, start, stop), distances))
        self.norms[key] = max(self.norms.get(key, 0.0), float(np.sqrt(squares)))


class Sheet:
    """One rank's sheet; arrays are read on access."""

    def __init__(self, path: Path):
        self.facts: dict[str, Any] = json.loads(path.read_text())
        self._store = ArrayStore(path.with_suffix(".bin"), self.facts.pop("arrays"))

    def group(self, name: str) -> Iterator[str]:
        """The keys of a group of arrays."""
        return (n.removeprefix(f"{name}|") for n in self._store.index if n.startswith(f"{name}|"))

    def has(self, group: str, key: str) -> bool:
        return f"{group}|{key}" in self._store

    def array(self, group: str, key: str) -> np.ndarray:
        return self._store.get(f"{group}|{key}")

    def box(self, key: str, array: np.ndarray) -> tuple[Box, tuple[int, ...]]:
        """The box of a shard in the whole tensor, and that tensor's shape."""
        shape, offset = self.facts["cut"].get(key, (array.shape, (0,) * array.ndim))
        return Box(tuple(offset), array.shape), tuple(shape)


@dataclass
class Trace:
    """One side's record of its steps in one precision, with every quantity assembled from the sheets of its ranks."""

    sheets: list[Sheet]

    @classmethod
    def read(cls, folder: Path, name: str, ranks: int) -> Trace | None:
        """Reads a trace; None if the side has none of this name."""
        paths = [folder / f"{name}.{rank}.json" for rank in range(ranks)]
        return cls([Sheet(path) for path in paths]) if all(path.exists() for path in paths) else None

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of rank 0."""
        return self.sheets[0].facts

    @cached_property
    def _holders(self) -> dict[str, list[Sheet]]:
        holders: dict[str, list[Sheet]] = {}
        for sheet in self.sheets:
            for key in sheet.group("shard"):
                holders.setdefault(key, []).append(sheet)
        return holders

    @property
    def keys(self) -> set[str]:
        return set(self._holders)

    def array(self, key: str) -> np.ndarray:
        """A whole quantity in float64. Raises ValueError if a part of it is missing on all ranks."""
        arrays = [(sheet, sheet.array("shard", key)) for sheet in self._holders[key]]
        boxes = [sheet.box(key, array) for sheet, array in arrays]
        shape = boxes[0][1]
        if boxes[0][0] == full_box(shape):
            return arrays[0][1].astype("float64", copy=False)
        takes, missing = assemble(full_box(shape), [box for box, _ in boxes])
        if missing:
            raise ValueError(f"{key}: no rank wrote {missing[0]} of {list(shape)}")
        result = np.zeros(shape, "float64")
        for index, box in takes:
            result[box.slices] = arrays[index][1][box.inside(boxes[index][0])]
        return result

    def cut(self, key: str) -> bool:
        """Whether ranks hold slices of the quantity."""
        return any(key in sheet.facts["cut"] for sheet in self._holders[key])

    def copies(self, key: str) -> dict[int, np.ndarray]:
        """By rank: the copies that differ; empty if all are equal."""
        return {
            rank: sheet.array("copy", key) for rank, sheet in enumerate(self.sheets) if sheet.has("copy", key)
        }

    def rounded(self, key: str) -> float:
        """The bound of the ranks' rounding error in a gradient, as a 2-norm, or in the gradient norm; 0 without."""
        quantity, lost = Key.read(key), self._lost
        if quantity.kind != "gradient norm":
            return lost.get(key, 0.0)
        step = ("gradient", quantity.step)
        return sum(bound**2 for n, bound in lost.items() if Key.read(n)[:2] == step) ** 0.5

    @cached_property
    def _lost(self) -> dict[str, float]:
        lost: dict[str, float] = {}
        for sheet in self.sheets:
            for key, rank_lost in sheet.facts.get("rounded", {}).items():
                lost[key] = lost.get(key, 0.0) + rank_lost
        return lost

    def noise(self, key: str) -> tuple[np.ndarray, float] | None:
        """One process's floors: the largest distance of each element, and of the 2-norm, in its runs with noise."""
        norms = self.facts.get("noise", {})
        return (self.sheets[0].array("noise", key), norms[key]) if key in norms else None
