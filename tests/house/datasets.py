"""Small data sets: numbers that name their sample, read one by one, at random or many at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Samples:
    """Sample i is `sample(i)`."""

    def __init__(self, samples: int, sample: Callable[[int], Any]):
        self.samples, self._sample = samples, sample

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self._sample(index)


class Arrays:
    """Sample i is a row of each of two arrays, inputs and targets."""

    def __init__(self, inputs: Any, targets: Any):
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Points(Arrays):
    """Points of normal numbers. A point's class is its largest number among the first four, or, `by_index`, i % 4."""

    def __init__(self, samples: int = 100, features: int = 6, seed: int = 0, by_index: bool = False):
        points = np.random.RandomState(seed).randn(samples, features).astype("float32")
        super().__init__(points, np.arange(samples) % 4 if by_index else points[:, :4].argmax(1))


class Numbers:
    """Sample i is (i, i) and 10 i; its name is "i.jpg"."""

    def __init__(self, samples: int, width: int = 2):
        self.samples, self.width = samples, width

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return np.full(self.width, index, np.float32), 10 * index

    def name_of(self, index: int) -> str:
        return f"{index}.jpg"


class Slow(Numbers):
    """`Numbers` each of which takes so many seconds."""

    def __init__(self, samples: int, seconds: float):
        super().__init__(samples)
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Noisy(Numbers):
    """Sample i is noise of both generators, and i."""

    def __getitem__(self, index: int) -> Any:
        return np.float32([random.random(), np.random.random()]), index


class InMemory(Numbers):
    """`Numbers` that are read many at once."""

    def take(self, indices: Any) -> Any:
        return np.repeat(indices.astype(np.float32)[:, None], self.width, axis=1), 10 * indices
