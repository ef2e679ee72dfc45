"""Reads samples of a map-style data set as arrays, one or a batch, with errors that name the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.data.randomness import globals_kept, seed_sample
from paddle_dp.data.sampler import Indices, Sampler
from paddle_dp.data.stream import Stream
from paddle_dp.errors import DataError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.structure import leaves, mapped, named_leaves

Array = np.ndarray[Any, Any]
Arrays = Any
"""An array, or a structure of arrays."""
Pair = tuple[Arrays, Arrays]
_NUMBERS = "biufcV"  # NumPy's kinds: bool, integers, floats, complex; bfloat16 is a V
_UNKNOWN = (np.uint32, np.uint64, np.longdouble, np.clongdouble)  # to Paddle 3.3.1


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
    if isinstance(dataset, Stream):
        return class_names(dataset.source)
    if not isinstance(dataset, Classified) or isinstance(dataset.classes, np.ndarray):
        return ()
    return tuple(dataset.classes or ())


def as_arrays(value: Any) -> Arrays:
    """A part of a sample as an array, or as a structure of arrays: a dict, or a tuple or list with arrays in it.

    A list of plain numbers is an array. Two arrays are never made one: they are two inputs.
    """
    if isinstance(value, Mapping):
        named = {str(key): as_arrays(value[key]) for key in value}
        if len(named) < len(value):
            raise ValueError(f"two of the keys {', '.join(map(repr, value))} are the same word")
        return named
    if isinstance(value, (tuple, list)) and (any(map(_is_part, value)) or _are_of_types(value)):
        return tuple(map(as_arrays, value))
    return as_array(value)


def _are_of_types(values: Sequence[Any]) -> bool:
    """Whether NumPy's numbers have different types, as a class and a weight: an array would make them one."""
    return len({value.dtype for value in values if isinstance(value, np.generic)}) > 1


def _is_part(value: Any) -> bool:
    """Whether an entry of a tuple is an array, or has one in it."""
    if isinstance(value, (tuple, list)):
        return any(map(_is_part, value))
    return isinstance(value, Mapping) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def as_array(value: Any) -> Array:
    """A part of a sample as an array in the machine's order of bytes; a Python float, and a list of them, becomes
    float32, as in Paddle. Raises ValueError for uint16."""
    array = np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)
    if array.dtype == np.uint16 and isinstance(value, (np.ndarray, np.generic)):
        raise ValueError("it is of type uint16, which Paddle takes for the bits of bfloat16: give int32")
    if array.dtype == np.float64 and isinstance(value, (list, tuple)):
        return array.astype(np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def name(dataset: Dataset, index: int) -> str:
    """«sample 17 (path/of/17.jpg)», or «sample 17» if the data set has no names."""
    name_of = file_names(dataset)
    try:
        return f"sample {index} ({name_of(index)})" if name_of else f"sample {index}"
    except Exception:  # noqa: BLE001 - the name is for a message: it must not hide the error in it
        return f"sample {index}"


def read_seeded(dataset: Dataset, seed: int, epoch: int, index: int) -> Pair:
    """`read_sample`, with random numbers that only (seed, epoch, index) decide."""
    if isinstance(dataset, Stream):
        return read_sample(dataset.of_epoch(seed, epoch), index)
    seed_sample(seed, epoch, index)
    return read_sample(dataset, index)


def read_sample(dataset: Dataset, index: int) -> Pair:
    """`dataset[index]` as input and target, each an array or a structure of arrays. Raises DataError, with the
    sample's name, if it cannot be read."""
    try:
        sample = dataset[index]
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from error
    except Exception as error:
        raise DataError(f"{name(dataset, index)}: {type(error).__name__}: {error}") from error
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        what = f"{len(sample)} parts" if isinstance(sample, (tuple, list)) else type(sample).__name__
        several = ": of several inputs, make one dict or tuple, ((a, b), target)" if "parts" in what else ""
        raise DataError(f"{name(dataset, index)} is {what}: return (input, target){several}")
    try:
        pair = as_arrays(sample[0]), as_arrays(sample[1])
    except ValueError as error:  # lists of unequal lengths
        raise DataError(f"{name(dataset, index)} is no array: {error}") from None
    for word, part in zip(("inputs", "targets"), pair, strict=True):
        if not leaves(part):
            raise DataError(f"{name(dataset, index)} has no {word}: they are {part}, without an array")
        for where, leaf in named_leaves(part):
            if leaf.dtype.kind not in _NUMBERS or leaf.dtype in _UNKNOWN:
                at = f" at {where}" if where else ""
                raise DataError(
                    f"{name(dataset, index)} is of type {leaf.dtype}{at}, which no tensor can hold"
                )
    return pair


def describe(arrays: Arrays) -> str:
    """«float32[3, 224, 224]»; «{ids: int64[12], mask: bool[12]}»."""
    if isinstance(arrays, dict):
        return "{" + ", ".join(f"{key}: {describe(arrays[key])}" for key in sorted(arrays)) + "}"
    if isinstance(arrays, (tuple, list)):
        return "(" + ", ".join(map(describe, arrays)) + ")"
    return f"{arrays.dtype}{list(arrays.shape)}"


def read_samples(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    """The samples stacked: inputs [n, ...] and targets [n, ...], each read with random numbers of its own."""
    return reader(dataset)(dataset, indices, seed, epoch)


def reader(dataset: Dataset) -> Callable[[Dataset, Indices, int, int], Pair]:
    """`read_samples` for this data set, by one `take` or one by one; to ask which takes 20 µs."""
    return _taken if is_stacked(dataset) else _one_by_one


def _taken(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    heartbeat.at(int(indices[0]))
    return take(dataset, indices)


def _one_by_one(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    pairs = []
    for index in indices.tolist():
        heartbeat.at(index)
        pairs.append(read_seeded(dataset, seed, epoch, index))
    inputs, targets = zip(*pairs, strict=True)
    return stack(dataset, indices, inputs), stack(dataset, indices, targets)


def take(dataset: Any, indices: Indices) -> Pair:
    """`dataset.take(indices)`: inputs and targets whose arrays have len(indices) rows."""
    try:
        inputs, targets = dataset.take(indices)
    except Exception as error:
        raise DataError(f"samples {_some(indices)}: {type(error).__name__}: {error}") from error
    counts = [_rows(part) for part in (inputs, targets)]
    if counts != [len(indices)] * 2:
        got = f"{counts[0]} inputs and {counts[1]} targets"
        raise DataError(f"{type(dataset).__name__}.take gave {got} for {len(indices)} indices")
    return inputs, targets


def _rows(arrays: Arrays) -> int:
    """The rows of all its arrays; -1 where these differ."""
    counts = {len(leaf) for leaf in leaves(arrays)}
    return counts.pop() if len(counts) == 1 else -1


def stack(dataset: Dataset, indices: Indices, samples: Sequence[Arrays]) -> Arrays:
    """The arrays along a new first dim. Raises DataError that names the first of another structure, shape or dtype."""
    first = samples[0]
    for index, sample in zip(indices.tolist(), samples, strict=True):
        if not _alike(sample, first):
            other = f"{name(dataset, int(indices[0]))} is {describe(first)}"
            raise DataError(
                f"{name(dataset, index)} is {describe(sample)} but {other}: they cannot be stacked to a batch{PAD}"
            )
    return mapped(lambda *arrays: np.stack(arrays), *samples)


def _alike(one: Arrays, other: Arrays) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and one.dtype == other.dtype
    return describe(one) == describe(other)


PAD = " (loader.pad makes arrays of unequal lengths equal)"


def _some(indices: Indices) -> str:
    """The first few indices, for a message."""
    more = ", …" if len(indices) > 8 else ""
    return ", ".join(map(str, indices[:8].tolist())) + more


MicroArrays = tuple[Arrays, Arrays, int]
"""One micro-batch in arrays: inputs, targets, and how many of the samples count (see MicroBatch)."""


Part = list[tuple[Indices, int]]
"""What is read of one global batch, as `Sampler.reads` gives it."""


class Source(Protocol):
    """The arrays of one data rank's samples, batch by batch."""

    def read(self, epoch: int, parts: Iterator[Part]) -> Iterator[list[MicroArrays]]:
        """The micro-batches of each of the parts of global batches; valid until the next one is taken."""

    def workers_busy(self) -> float:
        """The CPU seconds of its processes so far."""
        ...

    def close(self) -> None: ...


class InProcess:
    """Reads in the training process itself, when a batch is taken."""

    def __init__(self, dataset: Dataset, sampler: Sampler):
        self.dataset, self.sampler = dataset, sampler
        self._keep = nullcontext if is_stacked(dataset) else globals_kept
        self._read = reader(dataset)

    def read(self, epoch: int, parts: Iterator[Part]) -> Iterator[list[MicroArrays]]:
        for part in parts:
            with self._keep():
                micro_batches = [
                    (*self._read(self.dataset, indices, self.sampler.seed, epoch), count)
                    for indices, count in part
                ]
            yield micro_batches

    def workers_busy(self) -> float:
        return 0.0

    def close(self) -> None:
        pass
