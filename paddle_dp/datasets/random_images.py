"""Random images with random labels, for benchmarks and tests: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._generated import Generated
from paddle_dp.units import Positive


@dataclass(frozen=True, kw_only=True)
class Config:
    shape: tuple[Positive, ...] = (3, 224, 224)
    """Shape of an image: [channels, height, width]."""

    classes: Positive = 1000
    """Number of classes."""

    samples: Positive = 1024
    """Images to train on."""

    test_samples: Positive = 256
    """Other images, to evaluate on."""

    seed: int = 0
    """Seed of the images."""

    def build(self, split: str) -> Generated:
        """Inputs float32 [*shape], mean 0 and variance 1 like normalised images; targets int64."""
        samples = self.samples if checked_split(split) == "train" else self.test_samples
        return Generated(self._draw, samples, self.seed, split)

    def _draw(self, generator: np.random.Generator) -> tuple[Array, np.int64]:
        label = np.int64(generator.integers(self.classes))
        uniform = generator.random(self.shape, dtype=np.float32)  # four times as fast as normal noise
        return (uniform - np.float32(0.5)) * np.float32(12**0.5), label
