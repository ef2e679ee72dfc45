"""Data sets of small pictures, kept in memory as bytes and normalised when they are read."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from paddle_dp.datasets._arrays import Array


class Pictures:
    """Pictures uint8 [n, channels, height, width], scaled to 0..1 and normalised by each channel's `mean` and `std`."""

    def __init__(
        self,
        pixels: Array,
        labels: Array,
        classes: tuple[str, ...],
        mean: Sequence[float],
        std: Sequence[float],
    ):
        self.pixels, self.labels, self.classes = pixels, labels, classes
        self._mean = 255 * np.array(mean, np.float32)[:, None, None]
        self._std = 255 * np.array(std, np.float32)[:, None, None]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Array, np.int64]:
        return self.normalised(self.pixels[index]), self.labels[index]

    def take(self, indices: Array) -> tuple[Array, Array]:
        return self.normalised(self.pixels[indices]), self.labels[indices]

    def normalised(self, pixels: Array) -> Array:
        """Normalises pixels to float32 of the same shape."""
        return (pixels.astype(np.float32) - self._mean) / self._std


class AugmentedPictures:
    """The same pictures, randomly shifted by up to `pad` pixels, padded with 0, and flipped with probability `flip`.

    It has no `take`, because random numbers are seeded per sample.
    """

    def __init__(self, pictures: Pictures, pad: int, flip: float):
        self.pictures, self.classes = pictures, pictures.classes
        self._pad, self._flip = pad, flip

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Array, np.int64]:
        pixels, pad = self.pictures.pixels[index], self._pad
        _, height, width = pixels.shape
        top, left = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
        padded = np.pad(pixels, ((0, 0), (pad, pad), (pad, pad)))
        cropped = padded[:, top : top + height, left : left + width]
        if random.random() < self._flip:
            cropped = cropped[:, :, ::-1]
        return self.pictures.normalised(cropped), self.pictures.labels[index]
