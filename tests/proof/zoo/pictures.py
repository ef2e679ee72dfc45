"""Pictures that are augmented anew in each epoch, without files: coloured digits through the transforms of image
files."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paddle_dp.datasets._images import Views
from paddle_dp.datasets.digits import Config as Digits


class Pictures:
    """Inputs float32 [3, 16, 16], targets int64."""

    def __init__(self, split: str, augment: str = "none", erase: float = 0.0):
        self._digits = Digits(as_image=True, size=16, channels=3).build(split)
        self._view = Views(size=16, crop=(0.6, 1.0), augment=augment, erase=erase).view(split)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        image, digit = self._digits[index]
        pixels = (255 * image.transpose(1, 2, 0)).astype(np.uint8)
        return self._view(Image.fromarray(pixels)), digit
