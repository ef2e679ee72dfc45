"""Random tokens for next-token prediction, for benchmarks and tests: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._generated import Generated
from paddle_dp.units import Positive


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab: Positive = 256
    """Size of the vocabulary."""

    length: Positive = 128
    """Tokens of a sample."""

    samples: Positive = 1024
    """Texts to train on."""

    test_samples: Positive = 256
    """Other texts, to evaluate on."""

    seed: int = 0
    """Seed of the texts."""

    def build(self, split: str) -> Generated:
        """Inputs int64 [length] in 0..vocab-1, targets int64 [length]: the same text shifted by one token."""
        samples = self.samples if checked_split(split) == "train" else self.test_samples
        return Generated(self._draw, samples, self.seed, split)

    def _draw(self, generator: np.random.Generator) -> tuple[Array, Array]:
        text = generator.integers(self.vocab, size=self.length + 1, dtype=np.int64)
        return text[:-1], text[1:]
