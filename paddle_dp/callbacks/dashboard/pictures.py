"""Samples as pictures: whatever an image data set gives, in 0 to 255 and as a PNG."""

from __future__ import annotations

import io

import numpy as np

_SMALLEST = 64


def picture(sample: object) -> np.ndarray | None:
    """uint8 [height, width, 3] of an array [h, w], [1 or 3 (or 4), h, w] or [h, w, 1 or 3 (or 4)]; None if it is none.

    The range is stretched to the sample's own least and largest number, so normalized samples can be seen too.
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
    times = -(-_SMALLEST // max(array.shape[:2]))  # small ones are enlarged, each pixel a square
    return shown.repeat(times, 0).repeat(times, 1)


def png(array: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(array).save(stream, format="PNG")
    return stream.getvalue()
