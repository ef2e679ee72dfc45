"""Generated data sets: each sample is computed from (seed, split, index) when it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.datasets._arrays import checked_split
from paddle_dp.units import Positive

Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator], tuple[Array, Any]]


class Generated:
    """`samples` samples, each drawn by `draw` from a generator seeded by (seed, split, index)."""

    def __init__(self, draw: Draw, samples: int, seed: int, split: str):
        self._draw, self._samples = draw, samples
        self._seed, self._split = seed % 2**64, int(split == "test")

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Array, Any]:
        if not 0 <= index < self._samples:
            raise IndexError(f"{index} is not one of {self._samples} samples")
        bits = np.random.Philox(key=[self._seed, index], counter=[0, 0, 0, self._split])
        return self._draw(np.random.Generator(bits))

    def take(self, indices: Array) -> tuple[Array, Array]:
        inputs, targets = zip(*map(self.__getitem__, indices.tolist()), strict=True)
        return np.stack(inputs), np.stack(targets)


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig:
    samples: Positive = 1024
    """Samples to train on."""

    test_samples: Positive = 256
    """Other samples, to evaluate on."""

    seed: int = 0
    """Seed of the samples."""

    def build(self, split: str) -> Generated:
        """Samples as `draw` makes them."""
        samples = self.samples if checked_split(split) == "train" else self.test_samples
        return Generated(self.draw, samples, self.seed, split)

    def draw(self, generator: np.random.Generator) -> tuple[Array, Any]:
        """A sample's input and target, from numbers of this generator alone."""
        raise NotImplementedError
