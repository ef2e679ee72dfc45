"""A data set for recipes, `use: tests.train.poisoned.Dataset`: images, of which some are not finite, or far off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


class Images:
    """Images [1, 8, 8] in four classes. Sample `bad` holds a NaN, sample `far` numbers 1000 times as large."""

    def __init__(self, samples: int, bad: Sequence[int] = (), far: Sequence[int] = ()):
        self.images = np.random.RandomState(0).randn(samples, 1, 8, 8).astype("float32")
        self.classes = self.images.reshape(samples, -1)[:, :4].argmax(1)
        self.images[list(bad), 0, 2, 3] = np.nan
        self.images[list(far)] *= 1000

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return self.images[index], self.classes[index]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """30 samples to learn from."""

    bad: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    samples: int = 30

    def build(self, split: str) -> Images:
        return Images(self.samples, self.bad, self.far) if split == "train" else Images(10)
