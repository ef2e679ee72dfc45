"""Pictures that callbacks share: a sample as PNG, the look of a timeline, a confusion matrix."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.figures import INK, new_figure, png_of

if TYPE_CHECKING:
    from paddle_dp.train import Evaluation

# The largest numbers of classes with legible numbers in cells, and with legible names on axes.
_MAX_CELLS, _MAX_NAMES = 20, 40
_SMALLEST = 64  # pixels of the longer side of a sample


def picture(sample: object) -> np.ndarray | None:
    """Converts an array [h, w], [1, 3 or 4, h, w] or [h, w, 1, 3 or 4] to uint8 [height, width, 3]; None for another
    shape.

    Values are scaled by the sample's minimum and maximum, so that normalised samples are visible, too.
    """
    array = np.asarray(sample)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size or array.dtype.kind not in "biuf":
        return None
    array = np.nan_to_num(array[:, :, : min(array.shape[2], 3)].astype("float32"))
    low, high = array.min(), array.max()
    scaled = (array - low) * (255 / (high - low)) if high > low else np.zeros_like(array)
    shown = np.broadcast_to(scaled.round().astype("uint8"), (*array.shape[:2], 3))
    times = -(-_SMALLEST // max(array.shape[:2]))  # enlarges small pictures: a pixel becomes a square
    return shown.repeat(times, 0).repeat(times, 1)


def png(array: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(array).save(stream, format="PNG")
    return stream.getvalue()


def timeline_figure(lanes: float, title: str) -> Any:
    """A figure for lanes of `lanes` inches together, with its title."""
    figure = new_figure(11.0, lanes, dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11.5, color=INK, fontweight="bold")
    return figure


def clear_frame(axes: Any, fontsize: float) -> None:
    """Removes frame and tick marks, so that lanes alone are seen."""
    axes.tick_params(length=0, labelcolor=INK, labelsize=fontsize)
    for side in axes.spines.values():
        side.set_visible(False)


def add_legend(figure: Any, patches: Sequence[Any], fontsize: float) -> None:
    figure.legend(
        handles=patches, loc="outside lower right", ncols=len(patches), frameon=False, fontsize=fontsize,
        labelcolor=INK,
    )  # fmt: skip


@lru_cache(maxsize=1)  # of `dashboard` and `evaluate`
def draw_confusion(evaluation: Evaluation, title: str) -> bytes:
    """A PNG of `evaluation.confusion`: true classes down, predicted across, shaded by the share of the true class."""
    counts = np.asarray(evaluation.confusion)
    names = evaluation.names_of_classes
    side = min(3.0 + 0.28 * len(counts), 14.0)
    figure = new_figure(side, side * 0.9, dpi=100)
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, fraction=0.046, label="share of the true class")
    if len(counts) <= _MAX_NAMES:
        axes.set_yticks(range(len(counts)), names)
        axes.set_xticks(range(len(counts)), names, rotation=90 if max(map(len, names)) > 2 else 0)
    if len(counts) <= _MAX_CELLS:
        _number(axes, counts, shares)
    right, total = int(np.trace(counts)), int(counts.sum())
    axes.set(xlabel="predicted", ylabel="true", title=f"{title}: {right} of {total} right")
    return png_of(figure, bbox_inches="tight")


def _number(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize="small")
