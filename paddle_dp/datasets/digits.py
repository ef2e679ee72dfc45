"""scikit-learn's 1797 handwritten digits, 8x8 grey pixels scaled to 0..1: real data, no download."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Arrays, checked_split, stratified
from paddle_dp.errors import InstallError
from paddle_dp.units import Fraction, Positive

PIXELS = 8  # height and width of a digit


@dataclass(frozen=True, kw_only=True)
class Config:
    held_out: Fraction = 0.2
    """Share of each class that is kept for the test split."""

    as_image: bool = False
    """Samples are images, [channels, size, size] instead of [64]."""

    size: Positive = PIXELS
    """Height and width of an image, a multiple of 8: each pixel is repeated. A ResNet needs 32."""

    channels: Positive = 1
    """Number of copies of the grey image; 3 for a model of colour images."""

    seed: int = 0
    """Seed of the choice of held-out samples."""

    def __post_init__(self) -> None:
        if self.held_out >= 1:
            raise ValueError("held_out: 1 leaves nothing to train on; 0.2 keeps a fifth for the test")
        if self.size % PIXELS:
            raise ValueError(f"size: {self.size} is no multiple of 8, and pixels are repeated; take 32")
        if not self.as_image and (self.size, self.channels) != (PIXELS, 1):
            raise ValueError(
                "as_image: size and channels are an image's: set as_image to true, or leave them out"
            )

    def build(self, split: str) -> Arrays:
        """Inputs float32 [64] or [channels, size, size] in 0..1, targets int64; every class is split in the same
        proportion."""
        pixels, digits = _table()
        test = stratified(digits, self.held_out, self.seed)
        chosen = test if checked_split(split) == "test" else ~test
        inputs = pixels[chosen]
        if self.as_image:
            grey, times = inputs.reshape(-1, 1, PIXELS, PIXELS), self.size // PIXELS
            inputs = grey.repeat(times, axis=2).repeat(times, axis=3).repeat(self.channels, axis=1)
        return Arrays(inputs, digits[chosen], classes=tuple("0123456789"))


@cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Pixels float32 [1797, 64] in 0..1 and digits int64 [1797], from scikit-learn's file.

    Importing scikit-learn itself would take two seconds.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise InstallError("the data set digits comes with scikit-learn: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)
