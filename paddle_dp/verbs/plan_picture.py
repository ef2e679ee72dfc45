"""Draws a plan as a PNG: where a step's time goes, with its error bar, and the share of the device's peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from textwrap import fill
from typing import Any

from paddle_dp.figures import INK, QUIET, new_figure, png_of
from paddle_dp.plan.ranking import LayoutRanking, PlannedLayout
from paddle_dp.plan.step_time import SHARES
from paddle_dp.text import amount, duration, plural
from paddle_dp.verbs.layout_plan import RecipePlan
from paddle_dp.verbs.plan_screen import PlanScreen, described, span_text

# By the names of `SHARES`: blue is work, orange and red are exchanges, grey is lost.
COLORS = {
    "compute": "#2f6fb5", "update": "#8ab6e3", "tensor": "#d9822b", "sequence": "#f0b429", "stages": "#b44d12",
    "norms": "#7b4fa6", "gradients": "#cf1124", "bubble": "#9aa5b1", "rest": "#d9dee4",
}  # fmt: skip
NAMES = {
    "compute": "compute", "update": "update", "tensor": "exchange of tensor ranks",
    "sequence": "exchange of sequence ranks", "stages": "handovers of the pipeline",
    "norms": "exchange of BatchNorms' statistics",
    "gradients": "exchange of gradients, the part that nothing hides", "bubble": "bubble of the pipeline",
    "rest": "start of a step",
}  # fmt: skip
PEAK_LABEL = "of the device's peak (FLOPs of the model, nothing counted twice)"


def draw_plan(plan: RecipePlan) -> bytes:
    """The PNG of a plan: a row for each layout of one number of cards, or for the chosen layout of each of several.

    A bar is a step's seconds (of several numbers of cards: card-seconds, so that equal bars are perfect scaling), its
    whisker holds 8 of 10 published runs; a layout that is not foretold is hatched, with a whisker from its least time.
    """
    is_curve = len(plan.rankings) > 1
    rows = _curve(plan.rankings) if is_curve else _layouts(plan.rankings[0])
    height = 1.9 + 0.42 * max(len(rows), 3)
    figure = new_figure(11.5, height, dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(
        fill(PlanScreen(plan).title(), 120), x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold"
    )
    times, shares = figure.subplots(1, 2, width_ratios=(2.1, 1), sharey=not is_curve)
    if not rows:
        times.text(0.5, 0.5, "no layout fits", ha="center", transform=times.transAxes, color=INK)
        return png_of(figure)
    _draw_times(times, rows, is_curve)
    if is_curve:
        _draw_scaling(shares, rows)
    else:
        _draw_shares(shares, rows)
    used = [name for name in COLORS if any(row.shares[name] >= 0.001 for _, row in rows)]
    _legend(figure, used, any(not row.rank for _, row in rows))
    return png_of(figure)


Rows = Sequence[tuple[str, PlannedLayout]]


def _layouts(ranking: LayoutRanking) -> Rows:
    """The rows of the screen's table, and the layouts without a rank below them."""
    chosen = ranking.chosen
    rows = [*ranking.with_chosen(), *ranking.unforetold]
    named = []
    for row in rows:
        mark = "→ " if chosen is not None and row.choice == chosen.choice else ""
        layout, _, batches = described(row.choice).partition(f"{row.choice}, ")
        size = f"{amount(row.memory.total)}{', tight' if row.tight else ''}"
        named.append((f"{mark}{row.choice}\n{layout}{batches}, {size}", row))
    return named


def _curve(rankings: Sequence[LayoutRanking]) -> Rows:
    return [
        (f"{plural(each.ranks, 'card')}:\n{each.chosen.choice}", each.chosen)
        for each in rankings
        if each.chosen is not None
    ]


def _draw_times(axes: Any, rows: Rows, is_curve: bool) -> None:
    """Stacked bars of seconds, or of card-seconds."""
    ends = []
    for y, (_, row) in enumerate(rows):
        unit = row.choice.degrees.ranks if is_curve else 1
        left, hatch = 0.0, None if row.rank else "////"
        for name in COLORS:
            width = row.shares[name] * row.seconds * unit
            axes.barh(
                y, width, left=left, height=0.62, color=COLORS[name], hatch=hatch, edgecolor="white", linewidth=0.4
            )  # fmt: skip
            left += width
        _whisker(axes, row.low * unit, row.high * unit, y)
        ends.append((row.high if row.rank else row.seconds) * unit)
    # The span of stage 3 is several times its bar: it may leave the picture, and its numbers are on the screen.
    edge = 1.22 * max(ends)
    axes.set_xlim(0, edge)
    for y, (end, (_, row)) in enumerate(zip(ends, rows, strict=True)):
        text = duration(row.seconds) if row.rank else f"at least {duration(row.low)}"
        text = span_text(row) if isfinite(row.high) and not row.rank else text
        lift = 0.0 if row.rank else 0.38  # above a whisker that has no end here
        axes.text(end + 0.012 * edge, y - lift, text, va="center", fontsize=7.5, color=INK)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7, linespacing=1.25)
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_xlabel("card-seconds a step: cards × seconds" if is_curve else "seconds a step", fontsize=9)
    _quiet(axes)


def _draw_shares(axes: Any, rows: Rows) -> None:
    """The share of the peak of each layout, on the rows of the bars."""
    for y, (_, row) in enumerate(rows):
        low, high = _peak_span(row)
        _whisker(axes, 100 * low, 100 * high, y)
        axes.plot(100 * row.peak_share, y, "o", color=COLORS["compute"] if row.rank else QUIET, markersize=5)
    axes.set_xlim(0, 100)
    axes.set_xlabel(fill(f"percent {PEAK_LABEL}", 40), fontsize=8.5)
    axes.tick_params(labelleft=False)
    _quiet(axes)


def _draw_scaling(axes: Any, rows: Rows) -> None:
    """The share of the peak by the number of cards; a layout that is not foretold has an empty mark."""
    cards = [row.choice.degrees.ranks for _, row in rows]
    axes.plot(cards, [100 * row.peak_share for _, row in rows], color=COLORS["compute"], linewidth=1.5)
    for number, (_, row) in zip(cards, rows, strict=True):
        low, high = _peak_span(row)
        axes.plot([number] * 2, [100 * low, 100 * high], color=INK, linewidth=1.3)
        face = COLORS["compute"] if row.rank else "white"
        axes.plot(
            number, 100 * row.peak_share, "o", color=COLORS["compute"], markerfacecolor=face, markersize=5
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(cards, map(str, cards), fontsize=8, rotation=45 if len(cards) > 8 else 0)
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("cards", fontsize=9)
    axes.set_ylabel(fill(f"percent {PEAK_LABEL}", 30), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e7eb", linewidth=0.7)


def _peak_span(row: PlannedLayout) -> tuple[float, float]:
    """The lowest and the highest share of the peak within the bar of seconds."""
    flops = row.peak_share * row.seconds
    return flops / row.high, min(flops / row.low, 1.0)


def _whisker(axes: Any, low: float, high: float, y: float) -> None:
    """A line between two numbers on the row `y`; dotted to the edge of the picture if one of them is unknown."""
    known = isfinite(high) and low > 0
    edge = high if isfinite(high) else 10 * low
    axes.plot([low, edge], [y, y], color=INK, linewidth=1.3, zorder=3, linestyle="-" if known else ":")
    for end in [low, high] if known else [low or high]:
        axes.plot([end, end], [y - 0.16, y + 0.16], color=INK, linewidth=1.3, zorder=3)


def _quiet(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.7)
    axes.set_axisbelow(True)


def _legend(figure: Any, names: Sequence[str], has_unforetold: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLORS[name], label=NAMES[name]) for name in names]
    handles.append(Line2D([], [], color=INK, label="8 of 10 published runs lay within"))
    if has_unforetold:
        handles.append(Patch(facecolor="white", edgecolor=QUIET, hatch="////", label="not foretold"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8, labelcolor=INK
    )


assert {*COLORS} == {*NAMES} == {*SHARES}
