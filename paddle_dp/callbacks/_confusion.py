"""The confusion matrix of an evaluation, as a picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paddle_dp.train import Evaluation

# The largest numbers of classes with legible numbers in cells, and with legible names on axes.
_MAX_CELLS, _MAX_NAMES = 20, 40


def draw(evaluation: Evaluation, title: str) -> bytes:
    """A PNG of `evaluation.confusion`: true classes down, predicted across, shaded by the share of the true class."""
    # pyplot may open a window system, and keeps every figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.asarray(evaluation.confusion)
    names = evaluation.classes or tuple(map(str, range(len(counts))))
    side = min(3.0 + 0.28 * len(counts), 14.0)
    figure = Figure(figsize=(side, side * 0.9), dpi=100)
    FigureCanvasAgg(figure)
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
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight")
    return stream.getvalue()


def _number(axes: Any, counts: np.ndarray, shares: np.ndarray) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize="small")
