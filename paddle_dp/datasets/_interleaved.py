"""Samples of several data sets as one data set: one after the other, or interleaved by weights.

After any k samples of an epoch, each data set has given k · its share of the weights, up to less than one sample. So
every batch has the mixture, not only its mean over many batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from heapq import heappop, heappush
from inspect import getattr_static
from itertools import pairwise
from math import gcd, lcm
from typing import Any, Literal

import numpy as np

from paddle_dp.batch import leaves, mapped, structure_of
from paddle_dp.datasets._arrays import Array, permutation
from paddle_dp.errors import DataError, UsageError

MOST_DRAWS = 2**30  # samples of an epoch; their order takes 8 bytes each in every rank
# Attributes of text data sets, which checks and `generate` read.
_SHARED = ("tokenizer", "texts", "mask", "template", "prompt", "answer")


def integer_weights(weights: Iterable[float]) -> list[int]:
    """The weights as the smallest whole numbers in the same proportion, of their decimal digits: 0.7, 0.3 → 7, 3."""
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * denominator) for fraction in fractions]
    return [number // gcd(*numbers) for number in numbers]


def interleave(weights: Sequence[int], draws: int) -> Array:
    """The number of the source that each draw takes, [draws]: after any k draws, source n was taken k · its share of
    the weights times, up to less than 1.

    The draw c of a source may come after c / share draws, rounded down, and must come before (c + 1) / share, rounded
    up; of those that may, the one that must come first is taken, and of equal ones the first in the list. With these
    windows a single processor meets every deadline (Baruah et al. 1996, Proportionate progress).
    """
    period = sum(weights)
    waiting, ready = [(0, number) for number in range(len(weights))], list[tuple[int, int]]()
    counts = [0] * len(weights)
    sequence = np.empty(min(draws, period), np.min_scalar_type(len(weights)))
    for draw in range(len(sequence)):
        while waiting and waiting[0][0] <= draw:
            _, number = heappop(waiting)
            heappush(ready, (-(-(counts[number] + 1) * period // weights[number]), number))
        _, number = heappop(ready)
        sequence[draw] = number
        counts[number] += 1
        heappush(waiting, (counts[number] * period // weights[number], number))
    return np.resize(sequence, draws)


def draws_of_epoch(
    weights: Sequence[int], lengths: Sequence[int], until: Literal["first_exhausted", "all_exhausted"]
) -> int:
    """The number of draws after which one source, or each, was taken as often as it has samples (`lengths`)."""
    period, choose = sum(weights), min if until == "first_exhausted" else max
    # A source's draw number n is before (n + 1) / share, so that many draws are enough to see it.
    enough = choose(-(-(n + 1) * period // weight) for n, weight in zip(lengths, weights, strict=True))
    if enough > MOST_DRAWS:
        return enough
    sequence = interleave(weights, enough)
    ends = [np.flatnonzero(sequence == number)[n - 1 : n] for number, n in enumerate(lengths)]
    return choose(int(end[0]) for end in ends if len(end)) + 1


def epoch_length(dataset: Any) -> int:
    """The samples of a data set until one comes again: all, or an epoch of one that states its order."""
    return len(dataset.epoch_order(0, 0) if getattr_static(dataset, "epoch_order", None) else dataset)


class Concatenated:
    """`repeats[n]` times the samples of data set n, one data set after the other. `sources`: data sets by their names
    in messages.

    Raises UsageError for data sets with other classes, or another tokenizer, than the first one's.
    """

    def __init__(self, sources: Mapping[str, Any], repeats: Sequence[int] | None = None):
        self._names, self._datasets = [*sources], [*sources.values()]
        self._sizes = [len(dataset) for dataset in self._datasets]
        counts = np.multiply(self._sizes, 1 if repeats is None else repeats, dtype=np.int64)
        self._starts: list[int] = [0, *np.cumsum(counts).tolist()]
        if (classes := self._common_classes()) is not None:
            self.classes = classes
        self._refuse_tokenizers()
        first = self._datasets[0]
        vars(self).update({name: getattr(first, name) for name in _SHARED if hasattr(first, name)})
        if all(getattr_static(dataset, "take", None) for dataset in self._datasets):
            self.take = self._take

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        source, sample = self._position(index)
        return self._datasets[source][sample]

    def first_samples(self) -> dict[str, int]:
        """The index of the first sample of each data set, by its name; also of those within a mixture."""
        samples: dict[str, int] = {}
        for name, start, dataset in zip(self._names, self._starts, self._datasets, strict=False):
            within = dataset.first_samples() if hasattr(dataset, "first_samples") else {name: 0}
            samples |= {inner: start + index for inner, index in within.items()}
        return samples

    def name_of(self, index: int) -> str:
        """Such as "dataset.sources.1 (text_files): sample 17", or with the file."""
        source, sample = self._position(index)
        dataset = self._datasets[source]
        name = dataset.name_of(sample) if hasattr(dataset, "name_of") else f"sample {sample}"
        return f"{self._names[source]}: {name}"

    def file_of(self, index: int) -> str | None:
        source, sample = self._position(index)
        dataset = self._datasets[source]
        file_of = getattr(dataset, "file_of", getattr(dataset, "name_of", None))
        return None if file_of is None else file_of(sample)

    def _position(self, index: int) -> tuple[int, int]:
        """The number of the data set, and the sample in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} samples")
        source = bisect_right(self._starts, index) - 1
        return source, (index - self._starts[source]) % self._sizes[source]

    def _take(self, indices: Array) -> Any:
        """Inputs and targets of these samples, stacked, where each data set has `take`. Raises DataError for samples of
        different forms."""
        sources = np.searchsorted(self._starts, indices, side="right") - 1
        present, rows, pairs = np.unique(sources).tolist(), list[Array](), list[Any]()
        for source in present:
            rows.append(np.flatnonzero(sources == source))
            samples = (indices[rows[-1]] - self._starts[source]) % self._sizes[source]
            pairs.append(tuple(self._datasets[source].take(samples)))
        forms = [_form(pair) for pair in pairs]
        for source, form in zip(present, forms, strict=True):
            if form != forms[0]:
                raise DataError(
                    f"samples of {self._names[source]} are {form}, and of {self._names[present[0]]} {forms[0]}: they "
                    "cannot be stacked to a batch"
                )
        back = np.argsort(np.concatenate(rows), kind="stable")
        return mapped(lambda *arrays: np.concatenate(arrays)[back], *pairs)

    def _common_classes(self) -> tuple[str, ...] | None:
        """The names of the classes, the same in each data set; None if one has none. Lists without names call a class
        by its number, and end with the largest label."""
        named: list[Any] = [getattr(dataset, "classes", None) for dataset in self._datasets]
        if any(isinstance(names, np.ndarray) or not names for names in named):
            return None
        longest: tuple[str, ...] = max((tuple(names) for names in named), key=len)
        for name, names in zip(self._names, named, strict=True):
            number = next((n for n, called in enumerate(names) if called != longest[n]), None)
            if number is not None:
                largest = self._names[[tuple(names) for names in named].index(longest)]
                raise UsageError(
                    f"{name} and {largest} have different classes: number {number} is '{names[number]}' and "
                    f"'{longest[number]}'. Give them the same class numbers."
                )
        return longest

    def _refuse_tokenizers(self) -> None:
        """Raises UsageError if the same tokens are other texts in two data sets."""
        known = [
            (name, getattr(tokenizer, "identity", None))
            for name, dataset in zip(self._names, self._datasets, strict=True)
            if (tokenizer := getattr(getattr(dataset, "texts", dataset), "tokenizer", None))
        ]
        for (first, identity), (name, other) in pairwise(known):
            if identity != other:
                raise UsageError(
                    f"{first} and {name} have different tokenizers: set the same tokenizer for both."
                )


class InterleavedSamples(Concatenated):
    """An epoch of `draws` samples, of data sets by weights.

    A data set is read in a random order, all its samples before any comes again, then in another order; the next epoch
    continues in it. A sample that an epoch has twice has two indices, so it is augmented differently. `draws` None: the
    epoch ends when one data set, or each, has given all its samples (`until`). Raises UsageError for an epoch without a
    sample of one of the data sets, or with more than 2**30.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Sequence[float],
        until: Literal["first_exhausted", "all_exhausted"] = "all_exhausted",
        draws: int | None = None,
    ):
        datasets, numbers = [*sources.values()], integer_weights(weights)
        self._lengths = [*map(epoch_length, datasets)]
        if draws is None:
            draws = draws_of_epoch(numbers, self._lengths, until)
        if draws > MOST_DRAWS:
            raise UsageError(
                f"an epoch would have {draws:,} samples, for the smallest weight with the largest data set: set "
                "dataset.samples to the samples of an epoch, or dataset.epoch=first_exhausted."
            )
        self._sequence = interleave(numbers, draws)
        self._counts = np.bincount(self._sequence, minlength=len(datasets)).tolist()
        for name, count in zip(sources, self._counts, strict=True):
            if not count:
                raise UsageError(
                    f"an epoch of {draws} samples has none of {name}, by its weight: set dataset.samples to more."
                )
        # How many of a data set's orders an epoch reads from: one may have been begun by the epoch before.
        repeats = [
            -(-(length - gcd(count, length) + count) // length)
            for length, count in zip(self._lengths, self._counts, strict=True)
        ]
        super().__init__(sources, repeats)
        self._have_epochs = [getattr_static(dataset, "at_epoch", None) is not None for dataset in datasets]
        if any(self._have_epochs):
            self.at_epoch = lambda seed, epoch: EpochView(self, seed, epoch)
            vars(self).pop("take", None)

    def epoch_order(self, seed: int, epoch: int) -> Array:
        """The indices of an epoch's samples, int64 [draws]."""
        order = np.empty(len(self._sequence), np.int64)
        for source in range(len(self._datasets)):
            order[self._sequence == source] = self._drawn(source, seed, epoch)
        return order

    def sample_of(self, index: int, seed: int, epoch: int) -> Any:
        """A sample as it is in this epoch, where a data set has other samples in each (`at_epoch`): its epochs are the
        rounds in which all of it is read."""
        source, sample = self._position(index)
        dataset = self._datasets[source]
        if self._have_epochs[source]:
            first = epoch * self._counts[source] // self._lengths[source]
            number = (index - self._starts[source]) // self._sizes[source]
            dataset = dataset.at_epoch(seed, first + number)
        return dataset[sample]

    def _drawn(self, source: int, seed: int, epoch: int) -> Array:
        """The indices that an epoch draws from one data set, in their order."""
        length, count, size = self._lengths[source], self._counts[source], self._sizes[source]
        begin, end = epoch * count, (epoch + 1) * count
        first = begin // length
        rounds = [
            self._starts[source] + (number - first) * size + self._round(source, seed, number)
            for number in range(first, -(-end // length))
        ]
        return np.concatenate(rounds)[begin - first * length :][:count]

    def _round(self, source: int, seed: int, number: int) -> Array:
        """All samples of a data set, in the order in which they are drawn for the `number`th time."""
        dataset = self._datasets[source]
        if getattr_static(dataset, "epoch_order", None):
            return np.asarray(dataset.epoch_order(seed, number), np.int64)
        return permutation(len(dataset), seed % 2**64, number, source)


class EpochView:
    """The samples of a mixture in one epoch."""

    def __init__(self, mixture: InterleavedSamples, seed: int, epoch: int):
        self._mixture, self._seed, self._epoch = mixture, seed, epoch

    def __len__(self) -> int:
        return len(self._mixture)

    def __getitem__(self, index: int) -> Any:
        return self._mixture.sample_of(index, self._seed, self._epoch)


def _form(pair: Any) -> str:
    """The structure, dtypes and shapes of a sample, of stacked ones."""
    arrays = [np.asarray(leaf) for leaf in leaves(pair)]
    shapes = ", ".join(f"{array.dtype}{list(array.shape[1:])}" for array in arrays)
    return shapes if len(arrays) == 2 else f"{shapes} in {structure_of(pair)}"
