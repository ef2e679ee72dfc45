"""Reads samples of a map-style data set as arrays, one or a batch, with errors that name the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.data.randomness import globals_kept, seed_sample
from paddle_dp.data.sampler import Indices, Sampler
from paddle_dp.errors import DataError
from paddle_dp.mesh.heartbeat import heartbeat

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]
_NUMBERS = "biufcV"  # NumPy's kinds: bool, integers, floats, complex; bfloat16 is a V


class Dataset(Protocol):
    """A data set: `len(ds)` and `ds[i] -> (input, target)`. `Stacked`, `Named` and `Classified` are optional."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Stacked(Protocol):
    """A data set in memory that reads many samples at once."""

    def take(self, indices: Any, /) -> Any:
        """(inputs, targets) of these samples, stacked: what `ds[i]` gives, and never random."""


@runtime_checkable
class Named(Protocol):
    """A data set whose samples have names, for messages."""

    def name_of(self, index: int, /) -> str:
        """The name of a sample, usually its file's path."""
        ...


@runtime_checkable
class Classified(Protocol):
    """A data set that knows the names of its classes, in the order of their numbers."""

    classes: Any


def is_stacked(dataset: Dataset) -> bool:
    """Whether it has `take`: samples are read many at a time, and are the same each time."""
    return isinstance(dataset, Stacked)


def file_names(dataset: Dataset) -> Callable[[int], str] | None:
    """Its `name_of`, or None."""
    return dataset.name_of if isinstance(dataset, Named) else None


def class_names(dataset: Dataset) -> tuple[str, ...]:
    """The names of its classes, or (). An array `classes` has targets rather than names."""
    if not isinstance(dataset, Classified) or isinstance(dataset.classes, np.ndarray):
        return ()
    return tuple(dataset.classes or ())


def as_array(value: Any) -> Array:
    """A part of a sample as an array; a Python float becomes float32, as in Paddle."""
    return np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)


def name(dataset: Dataset, index: int) -> str:
    """«sample 17 (path/of/17.jpg)», or «sample 17» if the data set has no names."""
    name_of = file_names(dataset)
    try:
        return f"sample {index} ({name_of(index)})" if name_of else f"sample {index}"
    except Exception:  # noqa: BLE001 - the name is for a message: it must not hide the error in it
        return f"sample {index}"


def read_sample(dataset: Dataset, index: int) -> Pair:
    """`dataset[index]` as two arrays. Raises DataError, with the sample's name, if it cannot be read."""
    try:
        sample = dataset[index]
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from error
    except Exception as error:
        raise DataError(f"{name(dataset, index)}: {type(error).__name__}: {error}") from error
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        what = f"{len(sample)} parts" if isinstance(sample, (tuple, list)) else type(sample).__name__
        raise DataError(f"{name(dataset, index)} is {what}: return (input, target)")
    pair = as_array(sample[0]), as_array(sample[1])
    if bad := [part for part in pair if part.dtype.kind not in _NUMBERS]:
        raise DataError(f"{name(dataset, index)} is of type {bad[0].dtype}, which no tensor can hold")
    return pair


def describe(array: Array) -> str:
    """«float32[3, 224, 224]»."""
    return f"{array.dtype}{list(array.shape)}"


def read_samples(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    """The samples stacked: inputs [n, ...] and targets [n, ...], each read with random numbers of its own."""
    if is_stacked(dataset):
        heartbeat.at(int(indices[0]))
        return take(dataset, indices)
    pairs = []
    for index in indices.tolist():
        heartbeat.at(index)
        seed_sample(seed, epoch, index)
        pairs.append(read_sample(dataset, index))
    inputs, targets = zip(*pairs, strict=True)
    return stack(dataset, indices, inputs), stack(dataset, indices, targets)


def take(dataset: Any, indices: Indices) -> Pair:
    """`dataset.take(indices)` as two arrays of len(indices) rows."""
    try:
        inputs, targets = dataset.take(indices)
    except Exception as error:
        raise DataError(f"samples {_some(indices)}: {type(error).__name__}: {error}") from error
    if len(inputs) != len(indices) or len(targets) != len(indices):
        got = f"{len(inputs)} inputs and {len(targets)} targets"
        raise DataError(f"{type(dataset).__name__}.take gave {got} for {len(indices)} indices")
    return inputs, targets


def stack(dataset: Dataset, indices: Indices, arrays: Sequence[Array]) -> Array:
    """The arrays along a new first dim. Raises DataError that names the first of another shape or dtype."""
    first = arrays[0]
    for index, array in zip(indices.tolist(), arrays, strict=True):
        if array.shape != first.shape or array.dtype != first.dtype:
            other = f"{name(dataset, int(indices[0]))} is {describe(first)}"
            raise DataError(
                f"{name(dataset, index)} is {describe(array)} but {other}: they cannot be stacked to a batch"
            )
    return np.stack(arrays)


def _some(indices: Indices) -> str:
    """The first few indices, for a message."""
    more = ", …" if len(indices) > 8 else ""
    return ", ".join(map(str, indices[:8].tolist())) + more


MicroArrays = tuple[Array, Array, int]
"""One micro-batch in arrays: inputs, targets, and how many of the samples count (see MicroBatch)."""


class Source(Protocol):
    """The arrays of one data rank's samples, batch by batch."""

    def read(self, epoch: int, start: int) -> Iterator[list[MicroArrays]]:
        """The micro-batches of each global batch from `start` on; valid until the next one is taken."""

    def close(self) -> None: ...


class InProcess:
    """Reads in the training process itself, when a batch is taken."""

    def __init__(self, dataset: Dataset, sampler: Sampler):
        self.dataset, self.sampler = dataset, sampler
        self._keep = nullcontext if is_stacked(dataset) else globals_kept

    def read(self, epoch: int, start: int) -> Iterator[list[MicroArrays]]:
        for k in range(start, self.sampler.batches):
            with self._keep():
                micro_batches = [
                    (*read_samples(self.dataset, indices, self.sampler.seed, epoch), count)
                    for indices, count in self.sampler.reads(epoch, k)
                ]
            yield micro_batches

    def close(self) -> None:
        pass
