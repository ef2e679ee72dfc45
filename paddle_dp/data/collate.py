"""Batches made by a data set: `collate_fn(samples) → (inputs, targets)`, as `paddle.io.DataLoader` takes it.

A global batch is cut into micro-batches, and each micro-batch among the ranks. Two ways give the same result on any
number of ranks: each sample is collated alone and must not depend on others; or all ranks collate the whole global
batch, and each keeps its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paddle_dp.batch import leaves, mapped
from paddle_dp.data.arrays import Pair, describe, pair_of
from paddle_dp.data.randomness import seed_sample
from paddle_dp.errors import DataError

CollateFn = Callable[[list[Any]], Any]
NEIGHBOUR_DEPENDENCE = "the result of collate_fn for a sample depends on the other samples"


@runtime_checkable
class Collates(Protocol):
    """A data set that makes batches of its samples itself."""

    def collate_fn(self, samples: list[Any], /) -> Any:
        """Returns (inputs, targets); each array has one row per sample, in their order."""


@dataclass(frozen=True, slots=True)
class Uncollated:
    """A data set's sample before `collate` makes a row of it; `is_global_batch`: together with its global batch."""

    sample: Any
    collate: CollateFn
    is_global_batch: bool


def collated(samples: Sequence[Uncollated]) -> Pair:
    """Inputs [n, …] and targets [n, …] of n samples. Raises DataError; its text continues the samples' names."""
    try:
        batch = samples[0].collate([uncollated.sample for uncollated in samples])
    except Exception as error:
        raise DataError(f"cannot be collated: {type(error).__name__}: {error}") from error
    try:
        pair = pair_of(batch)
    except DataError as error:
        raise DataError(f"cannot be collated: the result of collate_fn {error}") from error.__cause__
    if any(leaf.shape[:1] != (len(samples),) for leaf in leaves(pair)):
        raise DataError(
            f"cannot be collated: collate_fn made {describe(pair)} of {len(samples)}. Every array needs one row for "
            "each sample, in their order: a batch is cut into micro-batches, and these among the ranks."
        )
    return pair


def row(pair: Pair, number: int) -> Pair:
    """One sample of a batch."""
    inputs, targets = (mapped(lambda array: np.asarray(array[number]), structure) for structure in pair)
    return inputs, targets


def neighbour_dependence(samples: Sequence[Uncollated], seed: int) -> str:
    """A message if a sample's row changes when another sample of the batch changes; "" otherwise.

    Each sample in turn is replaced by its neighbour, then replaces all others, with the same random numbers. Samples
    that cannot be collated give "": the reader raises an error for them.
    """
    if len(samples) < 2 or samples[0].is_global_batch:
        return ""
    try:
        plain = _rows(samples, seed)
        for changed in range(len(samples)):
            replaced = [*samples]
            replaced[changed] = samples[changed - 1]
            rows, copies = _rows(replaced, seed), _rows([samples[changed]] * len(samples), seed)
            rows[changed] = copies[changed]
            for before, after in zip(plain, rows, strict=True):
                if difference := _difference(before, after):
                    return f"{NEIGHBOUR_DEPENDENCE}: {difference}. {_ADVICE}"
    except DataError:
        return ""
    return ""


_ADVICE = (
    "A rank has only its share of a batch, so that would be another batch on another number of ranks. Set "
    "loader.collate to batch: every rank then collates the whole global batch, and keeps its rows. Or, where it pads "
    "to the longest, let it pad to a length that is always the same."
)


def _rows(samples: Sequence[Uncollated], seed: int) -> list[Pair]:
    seed_sample(seed, 0, 0)
    pair = collated(samples)
    return [row(pair, number) for number in range(len(samples))]


def _difference(first: Pair, other: Pair) -> str:
    """How two rows differ; "" if they are equal."""
    if describe(first) != describe(other):
        return f"{describe(first)} with some, {describe(other)} with others"
    both = zip(leaves(first), leaves(other), strict=True)
    is_equal = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in both)
    return "" if is_equal else "the same shapes with other numbers"
