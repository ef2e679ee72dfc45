"""Figures of matplotlib, without pyplot: it may open a window system, and keeps every figure in a global list."""

from __future__ import annotations

import io
from typing import Any

INK, QUIET = "#1f2933", "#7b8794"  # of text
# Of lines and frames: the colours of a report's page (report/page.css), by their index there.
COLOURS = ("#2563b8", "#c2571a", "#1a7f47", "#7a45b0", "#b02a5b", "#0f7d86", "#7a6a12", "#7c8797")


def new_figure(width: float, height: float, dpi: int, **settings: Any) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, **settings)
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Any, **settings: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", **settings)
    return stream.getvalue()
