"""The tables and the picture of what strategies.py measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


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
        shown += [
            f"**{task}, {workers} workers** (target: held-out loss {targets[task]:g})\n",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
            *(
                _row([one for one in here if one.way == way], links, targets[task], whole)
                for way in dict.fromkeys(one.way for one in here)
            ),
            "",
        ]
    return "\n".join(shown)


def _row(over: Sequence[Training], links: Sequence[str], target: float, whole: int) -> str:
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
    words = [over[0].way, size, until, *parts, loss, f"{over[-1].accuracy:.4f}"]
    return f"| {' | '.join(words)} |"


def faults_table(rows: Sequence[Faulty]) -> str:
    """Markdown."""
    lines = [
        "| strategy | 4 workers, samples/s | one of them slow | left of it | one of them killed |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row.way} | {row.plain:.0f} | {row.slowed:.0f} | {row.slowed / row.plain:.2f} | {row.killed} |"
        )
    return "\n".join(lines)


NAMED = (
    "data_parallel", "data_parallel, bfloat16", "data_parallel, power_sgd rank 4", "local_sgd, every 8 steps",
    "DiLoCo, every 24 steps", "async_average", "1 parameter server", "2 parameter servers, async", "pipeline",
    "tensor",
)  # fmt: skip
"""The ways that have a colour in the picture: more of them nobody can tell apart."""


def picture(found: Sequence[Training], targets: Mapping[str, float], file: Path) -> None:
    """For each task and number of workers: loss by time over each link, and by bytes over the last. NAMED ways have
    their colours, all others are grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys((one.task, one.workers) for one in found))
    links = list(dict.fromkeys(one.link for one in found))
    columns = len(links) + 1
    figure, panels = pyplot.subplots(
        len(places), columns, figsize=(4.2 * columns + 3, 3.6 * len(places)), squeeze=False, sharey="row"
    )
    grey = 7  # of tab10; that is what the others are
    colors = [*(f"C{place}" for place in range(10) if place != grey), "black"]
    for row, (task, workers) in zip(panels, places, strict=True):
        here = [one for one in found if (one.task, one.workers) == (task, workers)]
        for panel, link in zip(row, [*links, None], strict=True):
            for one in here:
                if one.link != (links[-1] if link is None else link):
                    continue
                across = [point.mb if link is None else point.seconds for point in one.points]
                if link is None and across[-1] == 0:
                    continue
                losses = [point.loss for point in one.points]
                look: dict[str, Any] = {
                    "color": "#cccccc",
                    "linewidth": 0.9,
                    "label": "the others",
                    "zorder": 1,
                }
                if one.way in NAMED:
                    look = {"color": colors[NAMED.index(one.way)], "linewidth": 1.5, "label": one.way}
                panel.plot(across, losses, **look)
            panel.set_visible(bool(panel.lines))
            panel.axhline(targets[task], color="#888888", linewidth=0.8, dashes=(3, 3))
            panel.set_xscale("log")
            panel.spines[["top", "right"]].set_visible(False)
            axis = "MB sent by a worker" if link is None else f"seconds, {link}"
            panel.set_title(f"{task}, {workers} workers: {axis}", fontsize=10, loc="left")
        low = min(point.loss for one in here for point in one.points)
        row[0].set_ylim(low * 0.97, low * 1.6)
        row[0].set_ylabel("held-out loss")
    names = {
        label: line
        for panel in panels.flat
        for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    order = [name for name in (*NAMED, "the others") if name in names]
    figure.legend([names[name] for name in order], order, loc="center right", fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1 - 3 / (4.2 * columns + 3), 1))
    figure.savefig(file, dpi=100)
