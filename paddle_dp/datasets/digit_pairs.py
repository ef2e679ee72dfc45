"""Pairs of scikit-learn's handwritten digits: half of them show the same digit. Real data, no download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.datasets import digits
from paddle_dp.units import Fraction, Positive

Array = np.ndarray[Any, Any]


class Pairs:
    """A data set of `pairs` [n, 2] (indices of samples): two inputs, and the target 1 for the same class, else 0."""

    def __init__(self, samples: Any, pairs: Array):
        self.samples, self.pairs = samples, pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, indices: int | Array) -> tuple[tuple[Array, Array], Any]:
        first, other = self.pairs[indices].T
        inputs, targets = self.samples.inputs, self.samples.targets
        return (inputs[first], inputs[other]), (targets[first] == targets[other]).astype("int64")

    take = __getitem__


@dataclass(frozen=True, kw_only=True)
class Config:
    pairs: Positive = 10000
    """Pairs to learn from; a fifth as many are held out, of digits that no pair to learn from has."""

    held_out: Fraction = 0.2
    """Share of each class that is kept for the test split."""

    seed: int = 0
    """Seed of the choice of held-out samples, and of pairs."""

    def build(self, split: str) -> Pairs:
        """Inputs: two arrays float32 [64] in 0..1. Targets: int64, 1 for the same digit, else 0; each about half."""
        samples = digits.Config(held_out=self.held_out, seed=self.seed).build(split)
        draw = np.random.Generator(np.random.Philox(key=[self.seed % 2**64, int(split == "test")]))
        count = self.pairs if split == "train" else max(self.pairs // 5, 1)
        indices_of_class = [np.flatnonzero(samples.targets == number) for number in range(10)]
        pairs = []
        for number in range(count):
            first = int(draw.integers(len(samples)))
            digit = int(samples.targets[first])
            other = digit if number % 2 else (digit + int(draw.integers(1, 10))) % 10
            pairs.append((first, int(draw.choice(indices_of_class[other]))))
        return Pairs(samples, np.array(pairs))
