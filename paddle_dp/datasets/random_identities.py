"""Synthetic identities for very many classes: each is a random point, each sample a noisy view of a point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._generated import Array, GeneratedConfig
from paddle_dp.units import Positive

POINTS = 2  # the last word of the Philox counter for the points; 0 and 1 are the splits'


@dataclass(frozen=True, kw_only=True)
class Config(GeneratedConfig):
    """The `seen` identities are spread evenly over the class numbers."""

    features: Positive = 64
    """Length of a sample's vector."""

    classes: Positive = 1000
    """Number of identities."""

    seen: Positive = 1000
    """Number of identities that have samples."""

    samples: Positive = 4096
    """Samples to train on."""

    noise: float = 0.5
    """Standard deviation of a view's noise; the points' is 1."""

    def __post_init__(self) -> None:
        if self.seen > self.classes:
            raise ValueError(f"seen: {self.seen} is more than the {self.classes} classes there are")
        if self.noise < 0:
            raise ValueError(f"noise: {self.noise} is less than 0")

    def point(self, identity: int) -> Array:
        """An identity's point, float32 [features], computed from (seed, identity)."""
        bits = np.random.Philox(key=[self.seed % 2**64, identity], counter=[0, 0, 0, POINTS])
        return np.random.Generator(bits).standard_normal(self.features, dtype=np.float32)

    def draw(self, generator: np.random.Generator) -> tuple[Array, np.int64]:
        """An input float32 [features], of mean 0 and variance 1; a target int64 in 0..classes-1."""
        identity = int(generator.integers(self.seen)) * self.classes // self.seen
        noise = generator.standard_normal(self.features, dtype=np.float32) * np.float32(self.noise)
        view = (self.point(identity) + noise) / np.float32((1 + self.noise**2) ** 0.5)
        return view, np.int64(identity)
