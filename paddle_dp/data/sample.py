"""Reads samples of a map-style data set as arrays, single or as a batch, with errors that name the sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.batch import leaves, mapped
from paddle_dp.data.arrays import Arrays, Pair, describe, is_plain, pair_of, rows_of
from paddle_dp.data.collate import Uncollated, collated, row
from paddle_dp.data.randomness import restoring_globals, seed_sample
from paddle_dp.data.sampler import Indices, Sampler
from paddle_dp.data.stream import Stream, has_method
from paddle_dp.errors import DataError, UsageError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.text import few


class Dataset(Protocol):
    """A data set has `len(ds)` and `ds[i] -> (input, target)`. The protocols that follow are optional."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Named(Protocol):
    """A data set with names of samples, for messages."""

    def name_of(self, index: int, /) -> str:
        """The name of a sample, usually its file's path."""
        ...


@runtime_checkable
class InFiles(Protocol):
    """A data set with files, whose names and sizes tell one state of the data from another. Without the method,
    `name_of` gives them."""

    def file_of(self, index: int, /) -> str | None:
        """The path of the file that has a sample, or None."""


@runtime_checkable
class Classified(Protocol):
    """A data set that knows the names of its classes, in the order of their numbers."""

    classes: Any


def is_stacked(dataset: Dataset) -> bool:
    """True if the data set has `take(indices)`, which reads many samples at once, equal to `ds[i]` row by row, and is
    never random, nor of an epoch (`at_epoch(seed, epoch)`: the data set of this epoch, of the same length)."""
    return has_method(dataset, "take") and not has_method(dataset, "at_epoch")


def file_names(dataset: Dataset) -> Callable[[int], str | None] | None:
    """The data set's `file_of`, else `name_of`, or None."""
    if isinstance(dataset, InFiles):
        return dataset.file_of
    return dataset.name_of if isinstance(dataset, Named) else None


def class_names(dataset: Dataset) -> tuple[str, ...]:
    """The names of the data set's classes, or (). Arrays `classes` hold targets, and an int is their number."""
    if isinstance(dataset, Stream):
        return class_names(dataset.source)
    classes = dataset.classes if isinstance(dataset, Classified) else None
    return tuple(classes) if isinstance(classes, Iterable) and not hasattr(classes, "dtype") else ()


def name(dataset: Dataset, index: int) -> str:
    """ "sample 17 (path/of/17.jpg)", or "sample 17" if the data set has no names."""
    with suppress(Exception):  # an error here must not hide the error that names the sample
        if isinstance(dataset, Named):
            return f"sample {index} ({dataset.name_of(index)})"
    return f"sample {index}"


def read_seeded(dataset: Dataset, seed: int, epoch: int, index: int) -> Pair:
    """Reads a sample with random numbers that depend only on (seed, epoch, index). Raises as `read_sample` does."""
    sample = _raw_seeded_sample(dataset, seed, epoch, index)
    if isinstance(sample, Uncollated):
        _seed_batch(dataset, seed, epoch, index)
    return _pair(dataset, index, sample)


def read_sample(dataset: Dataset, index: int) -> Pair:
    """`dataset[index]` as input and target, each an array or a structure of arrays. Raises DataError with the sample's
    name if it cannot be read."""
    return _pair(dataset, index, raw_sample(dataset, index))


def raw_sample(dataset: Dataset, index: int) -> Any:
    """`dataset[index]`, unconverted. Raises DataError with the sample's name if it cannot be read, UsageError for an
    invalid setting."""
    try:
        return dataset[index]
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from error
    except UsageError:  # it concerns a setting, not this sample
        raise
    except Exception as error:
        raise DataError(f"{name(dataset, index)}: {type(error).__name__}: {error}") from error


def uncollated_samples(dataset: Dataset, indices: Iterable[int], seed: int, epoch: int) -> list[Uncollated]:
    """The samples before collating; [] for a data set without a collate_fn."""
    samples: list[Uncollated] = []
    for index in indices:
        if is_stacked(dataset):
            break
        sample = _raw_seeded_sample(dataset, seed, epoch, index)
        if not isinstance(sample, Uncollated):
            break
        samples.append(sample)
    return samples


def _raw_seeded_sample(dataset: Any, seed: int, epoch: int, index: int) -> Any:
    if isinstance(dataset, Stream):
        return raw_sample(dataset.at_epoch(seed, epoch), index)
    if has_method(dataset, "at_epoch"):
        dataset = dataset.at_epoch(seed, epoch)
    seed_sample(seed, epoch, index)
    return raw_sample(dataset, index)


def _seed_batch(dataset: Dataset, seed: int, epoch: int, first: int) -> None:
    """Seeds the collating of a batch by its first sample, with a seed that no sample uses."""
    seed_sample(seed, epoch, len(dataset) + first)


def _pair(dataset: Dataset, index: int, sample: Any) -> Pair:
    try:
        return row(collated([sample]), 0) if isinstance(sample, Uncollated) else pair_of(sample)
    except DataError as error:
        raise DataError(f"{name(dataset, index)} {error}") from error.__cause__


def read_samples(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    """Reads samples, each seeded separately, and stacks them: inputs [n, ...] and targets [n, ...]."""
    return (_read_stacked if is_stacked(dataset) else _read_each)(dataset, indices, seed, epoch)


def _read_stacked(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    heartbeat.at(int(indices[0]))
    return take(dataset, indices)


def _read_each(dataset: Dataset, indices: Indices, seed: int, epoch: int) -> Pair:
    pairs = []
    for index in indices.tolist():
        heartbeat.at(index)
        sample = _raw_seeded_sample(dataset, seed, epoch, index)
        if isinstance(sample, Uncollated):
            if sample.is_global_batch:
                return read_batch(dataset, indices, seed, epoch)
            _seed_batch(dataset, seed, epoch, index)
        pairs.append(_pair(dataset, index, sample))
    inputs, targets = zip(*pairs, strict=True)
    return stack(dataset, indices, inputs), stack(dataset, indices, targets)


def read_batch(
    dataset: Dataset,
    indices: Indices,
    seed: int,
    epoch: int,
    at: Callable[[int], None] = heartbeat.at,
) -> Pair:
    """Reads samples, each seeded separately, and collates them as one batch. `at` is called with each index before."""
    samples = []
    for index in indices.tolist():
        at(index)
        samples.append(_raw_seeded_sample(dataset, seed, epoch, index))
    _seed_batch(dataset, seed, epoch, int(indices[0]))
    try:
        return collated(samples)
    except DataError as error:
        raise DataError(f"samples {few(indices, 8)} {error}") from error.__cause__


def take(dataset: Any, indices: Indices) -> Pair:
    """`dataset.take(indices)`: inputs and targets, with len(indices) rows per array. Raises DataError."""
    try:
        inputs, targets = dataset.take(indices)
    except Exception as error:
        raise DataError(f"samples {few(indices, 8)}: {type(error).__name__}: {error}") from error
    if not (is_plain(inputs) and is_plain(targets)):
        try:
            inputs, targets = pair_of((inputs, targets))
        except DataError as error:
            raise DataError(f"samples {few(indices, 8)}: the result of take {error}") from error.__cause__
    counts = _rows(inputs), _rows(targets)
    if counts != (len(indices), len(indices)):
        got = f"{counts[0]} inputs and {counts[1]} targets"
        raise DataError(f"{type(dataset).__name__}.take gave {got} for {len(indices)} indices")
    return inputs, targets


def _rows(arrays: Arrays) -> int:
    """The number of rows of all arrays; -1 if they differ or one is a scalar."""
    if isinstance(arrays, np.ndarray):
        return len(arrays) if arrays.ndim else -1
    counts = {len(leaf) if leaf.ndim else -1 for leaf in leaves(arrays)}
    return counts.pop() if len(counts) == 1 else -1


def stack(dataset: Dataset, indices: Indices, samples: Sequence[Arrays]) -> Arrays:
    """Stacks the samples along a new first dim. Raises DataError for the first of another structure, shape or dtype."""
    first = samples[0]
    for index, sample in zip(indices.tolist(), samples, strict=True):
        if not _alike(sample, first):
            other = f"{name(dataset, int(indices[0]))} is {describe(first)}"
            raise DataError(
                f"{name(dataset, index)} is {describe(sample)} but {other}: they cannot be stacked to a batch{PAD}"
            )
    return mapped(lambda *arrays: np.stack(arrays), *samples)


def _alike(first: Arrays, other: Arrays) -> bool:
    if isinstance(first, np.ndarray) and isinstance(other, np.ndarray):
        return first.shape == other.shape and first.dtype == other.dtype
    return describe(first) == describe(other)


PAD = " (loader.pad makes arrays of unequal lengths equal; a collate_fn may under loader.collate: batch)"


MicroArrays = tuple[Arrays, Arrays, int]
"""One micro-batch as arrays: inputs, targets, and the number of samples that count (see MicroBatch)."""


Reads = Sequence[tuple[Indices, int]]
"""The samples of each micro-batch of a share, and how many of them count (`Sampler.reads`)."""


def micro_batches_of(pair: Pair, reads: Reads) -> list[MicroArrays]:
    """The micro-batches of `reads`, whose rows `pair` holds one after another."""
    micro_batches, row = [], 0
    for indices, count in reads:
        rows = slice(row, row := row + len(indices))
        micro_batches.append((rows_of(pair[0], rows), rows_of(pair[1], rows), count))
    return micro_batches


BatchShare = tuple[int, Sampler]
"""A data rank's share of one global batch: the batch's index, and the data rank's sampler."""


class BatchSource:
    """The arrays of one data rank's samples, batch by batch."""

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        """Yields the micro-batches of each share; they are valid until the next share is taken."""
        raise NotImplementedError

    def read_with_shares(
        self, epoch: int, shares: Iterator[BatchShare]
    ) -> Iterator[tuple[BatchShare, list[MicroArrays]]]:
        """Yields each share with its micro-batches; `read` may have taken later shares already."""
        begun: deque[BatchShare] = deque()

        def begin() -> Iterator[BatchShare]:
            for share in shares:
                begun.append(share)
                yield share

        for micro_batches in self.read(epoch, begin()):
            yield begun.popleft(), micro_batches

    def workers_busy(self) -> float:
        """The CPU seconds of the workers so far."""
        return 0.0

    def close(self) -> None:
        """Ends the workers, if there are any; the next read starts new ones."""


class InProcess(BatchSource):
    """Reads in the training process when a batch is taken; by one `take`, which may return the same memory each
    time."""

    def __init__(self, dataset: Dataset, sampler: Sampler):
        self.dataset, self.sampler = dataset, sampler
        self._at_once = is_stacked(dataset)

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        data, seed = self.dataset, self.sampler.seed
        for k, sampler in shares:
            reads = sampler.reads(epoch, k)
            if not self._at_once:
                with restoring_globals():
                    micro_batches = [
                        (*_read_each(data, indices, seed, epoch), count) for indices, count in reads
                    ]
            elif len(reads) > 1:
                indices = np.concatenate([indices for indices, _ in reads])
                micro_batches = micro_batches_of(_read_stacked(data, indices, seed, epoch), reads)
            else:
                micro_batches = [
                    (*_read_stacked(data, indices, seed, epoch), count) for indices, count in reads
                ]
            yield micro_batches
