"""scikit-learn's 1797 handwritten digits, 8x8 grey pixels scaled to 0..1: real data, no download."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Arrays, one_of, stratified
from paddle_dp.errors import InstallError
from paddle_dp.units import Fraction


@dataclass(frozen=True, kw_only=True)
class Config:
    held_out: Fraction = 0.2
    """Share of each class that is kept for the test split."""

    as_image: bool = False
    """Samples are [1, 8, 8] instead of [64]."""

    seed: int = 0
    """Seed of the choice of held-out samples."""

    def __post_init__(self) -> None:
        if self.held_out >= 1:
            raise ValueError("held_out: 1 leaves nothing to train on; 0.2 keeps a fifth for the test")

    def build(self, split: str) -> Arrays:
        """Inputs float32 [64] or [1, 8, 8] in 0..1, targets int64; every class is split in the same proportion."""
        pixels, digits = _table()
        test = stratified(digits, self.held_out, self.seed)
        chosen = test if one_of(split) == "test" else ~test
        shape = (-1, 1, 8, 8) if self.as_image else (-1, 64)
        return Arrays(pixels[chosen].reshape(shape), digits[chosen], classes=tuple("0123456789"))


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Pixels float32 [1797, 64] in 0..1 and digits int64 [1797], from scikit-learn's file.

    scikit-learn itself is not imported: that takes two seconds.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise InstallError("the data set digits comes with scikit-learn: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    return table[:, :-1] / 16, table[:, -1].astype(np.int64)
