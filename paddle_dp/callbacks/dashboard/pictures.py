"""Samples of image data sets as pictures in 0 to 255, and as PNG."""

from __future__ import annotations

import io

import numpy as np

_SMALLEST = 64


def picture(sample: object) -> np.ndarray | None:
    """uint8 [height, width, 3] from an array [h, w], [1, 3 or 4, h, w] or [h, w, 1, 3 or 4]; None for another shape.

    The values are scaled from the sample's own minimum and maximum, so that normalised samples can be seen, too.
    """
    array = np.asarray(sample)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if (
        array.ndim != 3
        or array.shape[2] not in (1, 3, 4)
        or array.size == 0
        or array.dtype.kind not in "biuf"
    ):
        return None
    array = np.nan_to_num(array[:, :, : min(array.shape[2], 3)].astype("float32"))
    low, high = array.min(), array.max()
    scaled = (array - low) * (255 / (high - low)) if high > low else np.zeros_like(array)
    shown = np.broadcast_to(scaled.round().astype("uint8"), (*array.shape[:2], 3))
    times = -(-_SMALLEST // max(array.shape[:2]))  # enlarges small pictures, each pixel to a square
    return shown.repeat(times, 0).repeat(times, 1)


def png(array: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(array).save(stream, format="PNG")
    return stream.getvalue()
