"""The tables and the picture of what strategies.py measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paddle_dp.figures import new_figure
from tools.tables import table


@dataclass(frozen=True, kw_only=True)
class Point:
    """A training at one evaluation: seconds since its first step, the held-out loss, megabytes (1e6 bytes) sent so far
    by a worker in the mean, and by the busiest node."""

    step: int
    seconds: float
    loss: float
    mb: float
    busiest_mb: float


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: `way` is the strategy's name in the tables."""

    way: str
    task: str
    workers: int
    link: str
    points: Sequence[Point]
    accuracy: float
    samples_per_second: float

    COLUMNS: ClassVar = (
        "way", "task", "workers", "link", "accuracy", "samples_per_second",
        "step", "seconds", "loss", "mb", "busiest_mb",
    )  # fmt: skip

    def rows(self) -> Iterator[list[Any]]:
        """A line of CSV for each point."""
        for point in self.points:
            own = [self.way, self.task, self.workers, self.link, self.accuracy, self.samples_per_second]
            yield [*own, point.step, point.seconds, point.loss, point.mb, point.busiest_mb]

    def reached(self, target: float) -> Point | None:
        """Where the held-out loss was first at or below the target."""
        return next((point for point in self.points if point.loss <= target), None)

    def __str__(self) -> str:
        last = self.points[-1]
        spent = f"{last.seconds:.1f} s, {last.mb:.1f} MB"
        return f"{self.task}, {self.way} of {self.workers} over {self.link}: loss {last.loss:.4f} in {spent}"


@dataclass(frozen=True, kw_only=True)
class Faulty:
    """Samples a second of a way with four workers, and with one of them slow; and what happens when one is killed."""

    way: str
    plain: float
    slowed: float
    killed: str


def read(lines: Iterable[Mapping[str, str]]) -> list[Training]:
    """Trainings from the lines of a CSV file."""
    found: dict[tuple[str, ...], Training] = {}
    for line in lines:
        numbers = {name: float(line[name]) for name in ("seconds", "loss", "mb", "busiest_mb")}
        point = Point(step=int(line["step"]), **numbers)
        key = line["way"], line["task"], line["workers"], line["link"]
        before = found[key].points if key in found else []
        found[key] = Training(
            way=key[0], task=key[1], workers=int(key[2]), link=key[3], points=[*before, point],
            accuracy=float(line["accuracy"]), samples_per_second=float(line["samples_per_second"]),
        )  # fmt: skip
    return list(found.values())


def tables(found: Sequence[Training], targets: Mapping[str, float]) -> str:
    """Markdown: a table for each task and number of workers, with two columns for each link: samples/s, and seconds to
    the target. Bytes and the end are those over the last link: it knows what each node sends."""
    shown = []
    for task, workers in dict.fromkeys((one.task, one.workers) for one in found):
        here = [one for one in found if (one.task, one.workers) == (task, workers)]
        links = list(dict.fromkeys(one.link for one in here))
        whole = max(one.points[-1].step for one in here)
        columns = [part for link in links for part in (f"{link}: samples/s", "s")]
        heads = ["strategy", "MB a step", "steps", *columns, "at the end: loss", "accuracy"]
        by_way = ([one for one in here if one.way == way] for way in dict.fromkeys(one.way for one in here))
        rows = table(heads, (_cells(over, links, targets[task], whole) for over in by_way))
        shown.append(f"**{task}, {workers} workers** (target: held-out loss {targets[task]:g})\n\n{rows}\n")
    return "\n".join(shown)


def _cells(over: Sequence[Training], links: Sequence[str], target: float, whole: int) -> list[str]:
    """A line of a way's trainings, one for each link but for those it does not know; `whole`: a training's steps."""
    end = over[-1].points[-1]
    size = f"{end.mb / end.step:.3f}"
    if end.busiest_mb > 1.05 * end.mb:
        size += f" (busiest {end.busiest_mb / end.step:.3f})"
    steps = sorted({there.step for one in over if (there := one.reached(target))})
    parts = []
    for link in links:
        one = next((one for one in over if one.link == link), None)
        there = one.reached(target) if one else None
        parts.append(f"{one.samples_per_second:.0f}" if one else "")
        parts.append(f"{there.seconds:.1f}" if there else "–" if one else "")
    until = "–" if not steps else str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"
    loss = f"{end.loss:.4f}" + (f" (step {end.step})" if end.step < whole else "")
    return [over[0].way, size, until, *parts, loss, f"{over[-1].accuracy:.4f}"]


def faults_table(rows: Sequence[Faulty]) -> str:
    """Markdown."""
    names = ["strategy", "4 workers, samples/s", "one of them slow", "left of it", "one of them killed"]
    cells = (
        [row.way, f"{row.plain:.0f}", f"{row.slowed:.0f}", f"{row.slowed / row.plain:.2f}", row.killed]
        for row in rows
    )
    return table(names, cells)


def seconds_to_target(found: Sequence[Training], target: float) -> dict[str, float | None]:
    """By way, the seconds to the target; None for one that has not reached it."""
    points = {training.way: training.reached(target) for training in found}
    return {way: point.seconds if point else None for way, point in points.items()}


def read_page(page: str, panel: tuple[str, int, str]) -> tuple[dict[str, float | None], float]:
    """`seconds_to_target` and the target of a panel (task, workers, link), from the tables on a page."""
    task, workers, link = panel
    table = page.split(f"**{task}, {workers} workers** ", 1)[1]
    heading, _, head, _, *rest = table.splitlines()
    column = [cell.strip() for cell in head.split("|")].index(f"{link}: samples/s") + 1
    seconds: dict[str, float | None] = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), rest):
        cells = [cell.strip() for cell in line.split("|")]
        if cells[column]:
            seconds[cells[1]] = None if cells[column] == "–" else float(cells[column])
    return seconds, float(heading.rstrip(")").rpartition(" ")[2])


def picture(seconds: Mapping[str, float | None], title: str, file: Path) -> None:
    """A bar for each way, the fastest first, with its seconds; the ways of `data_parallel` are darker."""
    ways = sorted(seconds, key=lambda way: seconds[way] or math.inf)
    figure = new_figure(7, 0.6 + 0.27 * len(ways), dpi=100)
    panel = figure.subplots()
    for row, way in enumerate(ways):
        color = "#1f77b4" if way.startswith("data_parallel") else "#9ecae1"
        panel.barh(row, seconds[way] or 0, color=color)
        label = "target not reached" if seconds[way] is None else f"{seconds[way]:.1f}"
        panel.text(seconds[way] or 0, row, f" {label}", va="center", fontsize=9)
    panel.set_yticks(range(len(ways)), ways, fontsize=9)
    panel.invert_yaxis()
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.tick_params(bottom=False, labelbottom=False, left=False)
    panel.set_xmargin(0.12)
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout()
    figure.savefig(file)
