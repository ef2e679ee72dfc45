"""A data set of two arrays in memory, and its split by class."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Arrays:
    """Inputs [n, ...] and targets [n, ...] as a data set; `take` reads many samples in one indexing."""

    def __init__(self, inputs: Array, targets: Array, classes: tuple[str, ...] | None = None):
        self.inputs = np.ascontiguousarray(inputs)
        self.targets = np.ascontiguousarray(targets)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, indices: int | Array) -> tuple[Array, Array]:
        return self.inputs[indices], self.targets[indices]

    take = __getitem__


def stratified(labels: Array, fraction: float, seed: int) -> Array:
    """The mask bool [n] of the samples to hold out: ceil(fraction · n), each class in proportion. Deterministic.

    Each class gives the integer part of its quota; the classes with the largest remainders give one more (Hare quota),
    so the sizes equal those that scikit-learn's train_test_split gives.
    """
    classes, counts = np.unique(labels, return_counts=True)
    quota = counts * fraction
    take = np.floor(quota).astype(int)
    missing = int(np.ceil(fraction * len(labels) - 1e-9)) - int(take.sum())
    take[np.argsort(take - quota, kind="stable")[:missing]] += 1
    draws = raw_draws(len(labels), seed % 2**64)
    test_mask = np.zeros(len(labels), dtype=bool)
    for label, number in zip(classes, take, strict=True):
        members = np.flatnonzero(labels == label)
        test_mask[members[np.argsort(draws[members], kind="stable")[:number]]] = True
    return test_mask


def checked_split(split: str) -> str:
    """Returns `split` if it is "train" or "test", else raises ValueError."""
    if split not in ("train", "test"):
        raise ValueError(f"split: '{split}' is neither 'train' nor 'test'")
    return split


def permutation(count: int, *key: int) -> Array:
    """A permutation of 0 to `count` - 1 by the numbers in `key`, int64."""
    return np.argsort(raw_draws(count, *key), kind="stable")


def raw_draws(count: int, *key: int) -> Array:
    """Random numbers uint64 [count] by the numbers in `key`: Philox's raw stream, which NumPy never changes."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
