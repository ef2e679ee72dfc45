"""Random tokens for next-token prediction, for benchmarks and tests: nothing to download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._generated import Array, GeneratedConfig
from paddle_dp.units import Positive


@dataclass(frozen=True, kw_only=True)
class Config(GeneratedConfig):
    vocab: Positive = 256
    """Size of the vocabulary."""

    length: Positive = 128
    """Tokens of a sample."""

    def draw(self, generator: np.random.Generator) -> tuple[Array, Array]:
        """An input int64 [length] in 0..vocab-1, a target int64 [length]: the same text shifted by one token."""
        text = generator.integers(self.vocab, size=self.length + 1, dtype=np.int64)
        return text[:-1], text[1:]
