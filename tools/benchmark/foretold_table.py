"""The table, the verdict and the picture of what foretold.py measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.figures import new_figure
from tools import tables

LIMITS = {"namespaces": 10.0, "device": 7.0}  # percent
LEAST = 0.1  # seconds of a step that thresholds speak of
BUSY = 0.5  # processes beside ours that want a processor: with more, no verdict


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of a step, foretold and measured: the median of the rounds, the fastest and the slowest. `load`: the
    processes that wanted a processor before the rounds began, in the mean."""

    place: str
    model: str
    layout: str
    ranks: int
    link: str
    foretold: float
    bound: float
    measured: float
    low: float
    high: float
    rounds: int
    load: float

    @property
    def off(self) -> float:
        """Percent that the forecast is above the measurement."""
        return 100 * (self.foretold / self.measured - 1)


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each layout and link."""
    heads = [
        "",
        "model",
        "layout",
        "ranks",
        "link",
        "foretold, ms",
        "measured, ms",
        "rounds",
        "off",
        "bound, ms",
    ]
    lines = []
    for row in rows:
        spread = f"{1e3 * row.low:.0f} … {1e3 * row.high:.0f}" if row.rounds > 1 else "1"
        cells = [row.place, row.model, row.layout, row.ranks, row.link, f"{1e3 * row.foretold:.0f}"]
        cells += [f"{1e3 * row.measured:.0f}", spread, f"{row.off:+.0f} %", f"{1e3 * row.bound:.0f}"]
        lines.append(cells)
    return tables.table(heads, lines)


def verdict(rows: Sequence[Row]) -> tuple[list[str], int]:
    """Sentences on each place and number of ranks, and the exit status."""
    lines, missed = [], set[int]()
    for place, ranks in dict.fromkeys((row.place, row.ranks) for row in rows):
        here = [row for row in rows if (row.place, row.ranks) == (place, ranks)]
        judged = [abs(row.off) for row in here if row.measured >= LEAST]
        limit, load = LIMITS[place], statistics.mean(row.load for row in here)
        head = f"{place}, {ranks} ranks: {len(here)} steps, {len(judged)} of them of {1e3 * LEAST:.0f} ms or more"
        if not judged:
            lines.append(head)
            continue
        within = sum(off <= limit for off in judged)
        lines.append(
            f"{head}: {statistics.mean(judged):.1f} % off in the mean, {statistics.median(judged):.1f} % in the "
            f"median, {max(judged):.1f} % at most; {within} within {limit:g} %. Beside them {load:.1f} processes "
            "wanted a processor"
        )
        if within < len(judged):
            missed.add(3 if load > BUSY else 1)
    status = min(missed, default=0)  # what an idle machine missed is missed, whatever another place says
    lines += ["The machine was busy: no verdict."] if status == 3 else []
    return lines, status


def picture(rows: Sequence[Row], file: Path) -> None:
    """Measured against foretold seconds, a panel for each place."""
    places = list(dict.fromkeys(row.place for row in rows))
    figure = new_figure(5.5 * len(places), 5, dpi=110)
    panels = figure.subplots(1, len(places), squeeze=False)
    for panel, place in zip(panels[0], places, strict=True):
        here = [row for row in rows if row.place == place]
        ends = [0.8 * min(row.foretold for row in here), 1.25 * max(row.measured for row in here)]
        limit = LIMITS[place] / 100
        panel.fill_between(
            ends, [e * (1 - limit) for e in ends], [e * (1 + limit) for e in ends], color="#dbe9f6",
            label=f"within {LIMITS[place]:g} %",
        )  # fmt: skip
        panel.plot(ends, ends, color="#7b8794", linewidth=1)
        for number, kind in enumerate(dict.fromkeys((row.model, row.ranks) for row in here)):
            some = [row for row in here if (row.model, row.ranks) == kind]
            panel.errorbar(
                [row.foretold for row in some], [row.measured for row in some],
                yerr=[[row.measured - row.low for row in some], [row.high - row.measured for row in some]],
                fmt="os^D"[number % 4], markersize=4, linewidth=0.8, label=f"{kind[0]}, {kind[1]} ranks",
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel="foretold, s", ylabel="measured, s", title=place)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file)
