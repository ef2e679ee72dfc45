"""Small data sets: numbers that name their sample, read one by one, at random or many at once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


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


class Noisy(Numbers):
    """Sample i is noise of both generators, and i."""

    def __getitem__(self, index: int) -> Any:
        return np.float32([random.random(), np.random.random()]), index


class InMemory(Numbers):
    """`Numbers` that are read many at once."""

    def take(self, indices: Any) -> Any:
        return np.repeat(indices.astype(np.float32)[:, None], self.width, axis=1), 10 * indices
