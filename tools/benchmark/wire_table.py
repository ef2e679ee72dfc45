"""The table and the picture of what wire.py and overlap.py measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.figures import new_figure
from tools import tables


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout over one link: milliseconds of a step, and megabytes (1e6 bytes) that a node sends in it.

    `bound_ms`: the shortest step that the layout allows; `exposed_ms`: of one in which nothing is sent while a rank
    computes. None for what has no layout.
    """

    layout: str
    nodes: int
    link: str
    ms: float
    mb: float
    formula_mb: float
    bound_ms: float | None = None
    exposed_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.ms / self.bound_ms if self.bound_ms else None


def bytes_table(rows: Sequence[Row]) -> str:
    """Markdown: megabytes that a node sends in a step, beside the formula's."""
    cells = (
        [row.layout, row.nodes, f"{row.mb:.2f}", f"{row.formula_mb:.2f}", f"{row.mb / row.formula_mb:.3f}"]
        for row, *_ in _by_layout(rows)
    )
    return tables.table(["layout", "nodes", "MB a step", "formula", "ratio"], cells)


def table(rows: Sequence[Row]) -> str:
    """Markdown: for each layout and link, milliseconds of a step, of its bound, and their ratio."""
    links = list(dict.fromkeys(row.link for row in rows))
    heads = [head for link in links for head in (f"{link}: ms", "bound", "ratio")]
    lines = []
    for own in _by_layout(rows):
        over = {row.link: row for row in own}
        lines.append(
            [own[0].layout, own[0].nodes, *(cell for link in links for cell in _cells(over.get(link)))]
        )
    return tables.table(["layout", "nodes", *heads], lines)


def _by_layout(rows: Sequence[Row]) -> list[list[Row]]:
    names = dict.fromkeys((row.layout, row.nodes) for row in rows)
    return [[row for row in rows if (row.layout, row.nodes) == name] for name in names]


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    if row.bound_ms is None or row.ratio is None:
        return [f"{row.ms:.0f}", "", ""]
    return [f"{row.ms:.0f}", f"{row.bound_ms:.0f}", f"{row.ratio:.2f}"]


def picture(rows: Sequence[Row], file: Path) -> None:
    """A panel for each link: bars of the measured steps, a line at each one's bound, and one where nothing overlaps."""
    links = list(dict.fromkeys(row.link for row in rows))
    names = list(dict.fromkeys(row.layout for row in rows))
    height = 1.2 + 0.3 * len(names)
    figure = new_figure(4 * len(links) + 2, height, dpi=110)
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)
    for panel, link in zip(panels[0], links, strict=True):
        for row in (row for row in rows if row.link == link):
            place = names.index(row.layout)
            panel.barh(place, row.ms, color="#9dbbe0", height=0.6)
            if row.bound_ms is not None and row.exposed_ms is not None:
                panel.plot([row.bound_ms] * 2, [place - 0.38, place + 0.38], color="#1a7f37", linewidth=2.5)
                exposed = {"color": "#b35900", "linewidth": 1, "dashes": (2, 1)}
                panel.plot([row.exposed_ms] * 2, [place - 0.38, place + 0.38], **exposed)
        panel.set_title(link)
        panel.set_xlabel("ms a step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].invert_yaxis()
    figure.text(0.01, 0.01, "green: the bound; dashed: nothing is sent while a rank computes", fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(file)
