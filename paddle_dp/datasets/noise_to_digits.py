"""Pairs of noise and a digit, for a generator: the noise is drawn for each sample, so it is the same on any ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets import digits
from paddle_dp.units import Fraction, Positive


class NoiseToDigits:
    """Sample i: noise [numbers] of the standard normal distribution, and the pixels [64] of digit i in 0..1."""

    def __init__(self, pixels: np.ndarray, numbers: int):
        self._pixels, self._numbers = pixels, numbers

    def __len__(self) -> int:
        return len(self._pixels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        noise = np.random.standard_normal(self._numbers)  # seeded by the loader, per sample
        return noise.astype(np.float32), self._pixels[index]


@dataclass(frozen=True, kw_only=True)
class Config:
    numbers: Positive = 16
    """Random numbers of a sample, drawn anew in each epoch; equal to the model's `noise`."""

    held_out: Fraction = 0.2
    """Share of each class that is kept for the test split."""

    def build(self, split: str) -> NoiseToDigits:
        return NoiseToDigits(digits.Config(held_out=self.held_out).build(split).inputs, self.numbers)
