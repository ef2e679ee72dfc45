"""Made-up identities: each is a point, each sample a noisy view of one; for classifiers of very many classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._arrays import Array, one_of
from paddle_dp.datasets._generated import Generated
from paddle_dp.units import Positive

WHERE = 2  # the counter's last word for the points themselves; 0 and 1 are the splits'


@dataclass(frozen=True, kw_only=True)
class Config:
    """The identities that are seen lie evenly among all class numbers."""

    features: Positive = 64
    """Numbers of a sample."""

    classes: Positive = 1000
    """How many identities there are."""

    seen: Positive = 1000
    """How many of them have samples."""

    samples: Positive = 4096
    """Views to train on."""

    test_samples: Positive = 256
    """Other views, to evaluate on."""

    noise: float = 0.5
    """Of each view, beside the point's own normal numbers; 1 is as large as the point itself."""

    seed: int = 0
    """Where the points and views are drawn from."""

    def __post_init__(self) -> None:
        if self.seen > self.classes:
            raise ValueError(f"seen: {self.seen} is more than the {self.classes} classes there are")
        if self.noise < 0:
            raise ValueError(f"noise: {self.noise} is less than 0")

    def build(self, split: str) -> Generated:
        """Inputs float32 [features], of mean 0 and variance 1; targets int64 in 0..classes-1."""
        samples = self.samples if one_of(split) == "train" else self.test_samples
        return Generated(self._draw, samples, self.seed, split)

    def point(self, identity: int) -> Array:
        """Where an identity lies, float32 [features]; a pure function of (seed, identity)."""
        bits = np.random.Philox(key=[self.seed % 2**64, identity], counter=[0, 0, 0, WHERE])
        return np.random.Generator(bits).standard_normal(self.features, dtype=np.float32)

    def _draw(self, generator: np.random.Generator) -> tuple[Array, np.int64]:
        identity = int(generator.integers(self.seen)) * self.classes // self.seen
        noise = generator.standard_normal(self.features, dtype=np.float32) * np.float32(self.noise)
        view = (self.point(identity) + noise) / np.float32((1 + self.noise**2) ** 0.5)
        return view, np.int64(identity)
