"""Draws the mesh: each rank inside the frames of its coordinates, with one colour per split axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paddle_dp.figures import COLOURS, new_figure, png_of
from paddle_dp.mesh.degrees import AXES, RANK_FACTS, Degrees

# A rank's box; in its units, the margin of a frame and the height of its name; the largest number of frames in a row.
BOX, MARGIN, NAME, ROW = (1.0, 0.6), 0.12, 0.3, 8


@dataclass
class Frame:
    """A frame, or a rank's box if it has no content: its text, its size, and its content, (x, y, frame)."""

    text: str
    axis: str = ""
    width: float = BOX[0]
    height: float = BOX[1]
    content: list[tuple[float, float, Frame]] = field(default_factory=list)


def draw(degrees: Degrees, title: str) -> bytes:
    """A PNG of all ranks of `degrees`."""
    split = sorted(degrees.facts, key=AXES.__contains__)  # ranks on no axis stand above
    outer = _with_idle(degrees, frame(degrees, degrees.split_axes, {}))
    facts = {axis: RANK_FACTS[axis] for axis in split}
    legend = {f"{axis} {degrees[axis]}: ranks {f.role}": COLOURS[f.colour] for axis, f in facts.items()}
    legend = legend or {"one process: nothing is split": "black"}
    width, height = max(outer.width + 2 * MARGIN, 6.0), outer.height + 0.6 + 0.3 * len(legend)
    scale = min(1.0, 16 / width, 14 / height)
    figure = new_figure(width * scale, height * scale, dpi=110)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    size = 11 * scale if scale > 0.6 else 12 * scale
    heading = axes.text(MARGIN, 0.25, title, fontsize=1.1 * size, va="center", weight="bold")
    while heading.get_window_extent().x1 > 0.98 * figure.bbox.width:  # hinted glyphs shrink in steps
        heading.set_fontsize(0.95 * heading.get_fontsize())
    _paint(axes, outer, ((width - outer.width) / 2, 0.45), size)
    for line, (text, color) in enumerate(legend.items()):
        down = 0.68 + outer.height + 0.3 * line
        axes.text(MARGIN, down, f"■ {text}", fontsize=0.9 * size, va="center", color=color)
    return png_of(figure)


def frame(degrees: Degrees, split: Sequence[str], coords: dict[str, int]) -> Frame:
    """The frames of the axes in `split` at `coords`; stages below each other, other axes side by side."""
    if not split:
        return Frame(f"rank {degrees.rank(coords)}")
    axis, *inner = split
    frames = [
        _framed(f"{axis} {coord}", axis, frame(degrees, inner, {**coords, axis: coord}))
        for coord in range(degrees[axis])
    ]
    columns = 1 if axis == "pipeline" else min(degrees[axis], ROW)
    width, height = frames[0].width + MARGIN, frames[0].height + MARGIN
    content = [
        (number % columns * width, number // columns * height, inner_frame)
        for number, inner_frame in enumerate(frames)
    ]
    rows = -(-len(frames) // columns)
    return Frame("", "", columns * width - MARGIN, rows * height - MARGIN, content)


def _with_idle(degrees: Degrees, workers: Frame) -> Frame:
    """Puts a row of the ranks that read nothing, if there are any, above the others."""
    boxes = [Frame(f"rank {rank}") for rank in range(degrees.ranks) if not degrees.reads(rank)]
    if not boxes:
        return workers
    step = BOX[0] + MARGIN
    side_by_side = [(n * step, 0.0, box) for n, box in enumerate(boxes)]
    row = Frame("", "", len(boxes) * step - MARGIN, BOX[1], side_by_side)
    above = _framed("servers", "servers", row)
    width, down = max(above.width, workers.width), above.height + MARGIN
    content = [((width - each.width) / 2, y, each) for y, each in ((0.0, above), (down, workers))]
    return Frame("", "", width, down + workers.height, content)


def _framed(name: str, axis: str, inner_frame: Frame) -> Frame:
    inside = [(MARGIN, NAME, inner_frame)]
    return Frame(name, axis, inner_frame.width + 2 * MARGIN, inner_frame.height + NAME + MARGIN, inside)


def _paint(axes: Any, this: Frame, corner: tuple[float, float], size: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = corner
    if this.text:
        color = COLOURS[RANK_FACTS[this.axis].colour] if this.axis else "#444444"
        shape = FancyBboxPatch(
            (x, y), this.width, this.height, boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.2,
            edgecolor=color, facecolor=_tint(color) if this.axis else "white",
        )  # fmt: skip
        axes.add_patch(shape)
        text_corner = (x + MARGIN, y + NAME / 2) if this.axis else (x + this.width / 2, y + this.height / 2)
        axes.text(
            *text_corner, this.text, fontsize=size * (0.8 if this.axis else 0.9), va="center", color=color,
            ha="left" if this.axis else "center",
        )  # fmt: skip
    for right, down, block in this.content:
        _paint(axes, block, (x + right, y + down), size)


def _tint(color: str) -> tuple[float, ...]:
    """A light shade of "#rrggbb", opaque, so that nested frames keep their colours."""
    return tuple(1 - 0.14 * (1 - int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
