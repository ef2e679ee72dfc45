"""Random images with random labels, for benchmarks and tests: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._generated import Array, GeneratedConfig
from paddle_dp.units import Positive


@dataclass(frozen=True, kw_only=True)
class Config(GeneratedConfig):
    shape: tuple[Positive, ...] = (3, 224, 224)
    """Shape of an image: [channels, height, width]."""

    classes: Positive = 1000
    """Number of classes."""

    def draw(self, generator: np.random.Generator) -> tuple[Array, np.int64]:
        """An input float32 [*shape], mean 0 and variance 1 like normalised images; a target int64."""
        label = np.int64(generator.integers(self.classes))
        uniform = generator.random(self.shape, dtype=np.float32)  # four times as fast as normal noise
        return (uniform - np.float32(0.5)) * np.float32(12**0.5), label
