"""Line charts as SVG text, drawn by arithmetic: readable on a telephone, in the colours of the page that holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

Point = tuple[float, float]

WIDTH, HEIGHT = 420, 236
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 34
MOST_POINTS = 240  # of a curve; of more, each bucket's mean, in a band from its smallest to its largest
MOST_DOTS = 60
LOG_FROM = 200  # ratio of the largest to the smallest value from which an axis is logarithmic
COLOURS = 8


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve with its label. `bounds`: the interval of each point, drawn as a band; `dots`: mark the points, each
    with its numbers; `colour`: an index of the page's colours."""

    label: str
    points: Sequence[Point]
    bounds: Sequence[Point] = ()
    dots: bool = False
    colour: int = 0


def thinned(curve: Curve) -> Curve:
    """The curve with at most `MOST_POINTS` points: means of buckets, whose extremes are its bounds."""
    points = sorted(curve.points)
    if len(points) <= MOST_POINTS:
        return curve
    edges = [i * len(points) // MOST_POINTS for i in range(MOST_POINTS + 1)]
    buckets = [points[first:end] for first, end in pairwise(edges)]
    means = [(b[len(b) // 2][0], sum(y for _, y in b) / len(b)) for b in buckets]
    bounds = [(min(y for _, y in b), max(y for _, y in b)) for b in buckets]
    return Curve(label=curve.label, points=means, bounds=bounds, dots=False, colour=curve.colour)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between `low` and `high`, at most `count` + 1 or so."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next((f for f in (1, 2, 5) if (high - low) / (step * f) <= count), 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def short_number(value: float) -> str:
    """ "0.25", "12k", "3.4M", "1e-05"."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit and limit * 1e4 > size:
            return f"{value / min(limit, 1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.3g}" if size < 999.5 or size >= 1e16 else f"{value:.4g}"


@dataclass(frozen=True)
class _Axis:
    """Maps numbers from `low` to `high` to pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        shift: Callable[[float], float] = math.log10 if self.is_log else float
        share = (shift(value) - shift(self.low)) / ((shift(self.high) - shift(self.low)) or 1.0)
        return round(self.start + share * (self.stop - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.ceil(math.log10(self.low)), int(math.log10(self.high))
            decades = [10.0**n for n in range(first, last + 1)]
            if len(decades) > 1:
                return decades[:: -(-len(decades) // 5)]
        return ticks(self.low, self.high)


def _axis(values: Sequence[float], start: float, stop: float, may_be_log: bool, margin: float) -> _Axis:
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low > LOG_FROM:
        return _Axis(low, high, start, stop, True)
    if low == high:
        half = abs(low) / 10 or 1.0
        low, high = low - half, high + half
    else:
        room = margin * (high - low)
        low, high = (0.0 if 0 <= low < 4 * room else low - room), high + room
    if not (math.isfinite(high - low) and high - low > max(abs(low), abs(high)) * 1e-12):
        low, high = low - abs(low) - 1, high + abs(high) + 1
    return _Axis(low, high, start, stop)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x_label: str = "steps",
    marks: Sequence[tuple[float, str]] = (),
    may_be_log: bool = True,
) -> str:
    """A figure of HTML with a title, the curves over a common axis, and a legend if there is more than one.

    `marks`: positions that get a vertical line, with the reason; `may_be_log`: the axis becomes logarithmic for values
    that differ by more than `LOG_FROM` times. "" without any point.
    """
    curves = [thinned(curve) for curve in curves if curve.points]
    if not curves:
        return ""
    heights = [y for curve in curves for _, y in curve.points]
    heights += [bound for curve in curves for bounds in curve.bounds for bound in bounds]
    x = _axis([x for curve in curves for x, _ in curve.points], LEFT, WIDTH - RIGHT, False, 0.0)
    y = _axis(heights, HEIGHT - BOTTOM, TOP, may_be_log, 0.05)
    shapes = [*_grid(x, y, x_label)]
    for at, reason in marks:
        if x.low <= at <= x.high:
            shapes.append(
                f'<line class="mark" x1="{x(at)}" x2="{x(at)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{escape(reason)}</title></line>"
            )
    for curve in curves:
        shapes += _shapes(curve, x, y)
    legend = "".join(
        f'<span class="key"><i class="c{curve.colour % COLOURS}"></i>{escape(curve.label)}</span>'
        for curve in curves
        if len(curves) > 1
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}{" (logarithmic)" if y.is_log else ""}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(shapes)}</svg>'
        f"{f'<div class=legend>{legend}</div>' if legend else ''}</figure>"
    )


def _grid(x: _Axis, y: _Axis, x_label: str) -> list[str]:
    floor = HEIGHT - BOTTOM
    rows = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{short_number(tick)}</text>'
        for tick in y.ticks
    ]
    columns = [
        f'<text x="{x(tick)}" y="{floor + 16}" text-anchor="middle">{short_number(tick)}</text>'
        for tick in x.ticks
        if x(tick) < WIDTH - 60
    ]
    right = WIDTH - RIGHT
    label = f'<text x="{right}" y="{floor + 16}" text-anchor="end" class="unit">{escape(x_label)}</text>'
    base = f'<line class="base" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    return [*rows, *columns, label, base]


def _shapes(curve: Curve, x: _Axis, y: _Axis) -> list[str]:
    shade = f"c{curve.colour % COLOURS}"
    path = " ".join(f"{x(a)},{y(b)}" for a, b in curve.points)
    shapes = []
    if curve.bounds:
        above = [f"{x(a)},{y(high)}" for (a, _), (_, high) in zip(curve.points, curve.bounds, strict=True)]
        below = [f"{x(a)},{y(low)}" for (a, _), (low, _) in zip(curve.points, curve.bounds, strict=True)]
        shapes.append(f'<polygon class="band {shade}" points="{" ".join([*above, *reversed(below)])}"/>')
    if len(curve.points) > 1:
        dashes = ' stroke-dasharray="6 3"' if curve.colour >= COLOURS else ""  # a colour that is used again
        shapes.append(f'<polyline class="line {shade}"{dashes} points="{path}"/>')
    if curve.dots or len(curve.points) == 1:
        few = curve.points[:: -(-len(curve.points) // MOST_DOTS)]
        shapes += [
            f'<circle class="dot {shade}" cx="{x(a)}" cy="{y(b)}" r="2.6">'
            f"<title>{escape(curve.label)}, {short_number(a)}: {b:.6g}</title></circle>"
            for a, b in few
        ]
    return shapes
