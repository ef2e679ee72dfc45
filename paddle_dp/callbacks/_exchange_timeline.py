"""Records the times of each rank's computation and gradient messages, on one clock for all ranks, and draws them.

The picture shows one step of data-parallel ranks: the phases of each rank, and the gradients that it hands over
meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_dp.callbacks import _lines
from paddle_dp.callbacks._files import Files
from paddle_dp.callbacks._pictures import add_legend, clear_frame, timeline_figure
from paddle_dp.figures import INK, QUIET, png_of
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.heartbeat import ExchangeTrace, heartbeat
from paddle_dp.train import Callback, Moment, Refusal, Run

COLOURS = {
    "forward": "#9cc5eb", "backward": "#e08a3c", "exchange": "#b8336a", "update": "#6aa57a", "data": "#c9b8e8",
    "wait": "#e4c1d0", "given": "#1f2933", "link": "#8d99ae",
}  # fmt: skip
OTHER = "#d5d9df"
# By kind of a row: its lane of three and the lane's name; its middle, from the rank's, and its height.
LANES = {
    "work": (1, "computes", -0.2, 0.4), "wait": (1, "computes", -0.2, 0.4), "given": (2, "hands over", 0.12, 0.16),
    "link": (3, "link", 0.32, 0.16),
}  # fmt: skip
MOST_NAMED = 24  # buckets per rank
ROOM = 0.05  # share of the picture's width that a label with a size needs
LANE = 1.05  # inches per rank
MEASURED = (
    "timeline: nothing was recorded, because the same steps were measured for `paddle-dp why`. Train longer, or set "
    "callbacks.timeline.start to an earlier step."
)


@dataclass(frozen=True)
class TimelineRow:
    """A rank's activity from `start` to `stop`, in seconds since the step began. `kind`: "work" in the phase `label`;
    "wait" for other ranks; "given", a gradient or bucket that was handed over; "link", a message in transit."""

    rank: int
    kind: str
    label: str
    start: float
    stop: float

    @property
    def colour(self) -> str:
        return COLOURS.get(self.label if self.kind == "work" else self.kind, OTHER)


def trace(rows: Sequence[TimelineRow], degrees: Degrees) -> dict[str, Any]:
    """The rows in the Trace Event Format, which Perfetto reads: a process per rank, a thread per lane."""
    ranks = sorted({row.rank for row in rows})
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
        for rank in ranks
        for tid, name in sorted({lane[:2] for lane in LANES.values()})
    ]
    names += [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": _called(rank, degrees)}}
        for rank in ranks
    ]
    events = [
        {
            "ph": "X", "pid": row.rank, "tid": LANES[row.kind][0], "ts": round(row.start * 1e6, 1),
            "dur": round((row.stop - row.start) * 1e6, 1),
            "name": {"wait": "waits for others", "link": "message"}.get(row.kind, row.label),
        }
        for row in rows
    ]  # fmt: skip
    return {"traceEvents": names + events}


def _called(rank: int, degrees: Degrees) -> str:
    return degrees.role(rank) or f"rank {rank}"


def draw(rows: Sequence[TimelineRow], title: str, degrees: Degrees) -> bytes:
    """A PNG with three lanes per rank: its computation, the gradients that it hands over, and its link."""
    ranks, end = 1 + max(row.rank for row in rows), max(row.stop for row in rows)
    figure = timeline_figure(LANE * ranks + 1.5, title)
    axes = figure.subplots()
    for row in rows:
        *_, middle, height = LANES[row.kind]
        axes.barh(
            row.rank + middle, max(row.stop - row.start, end / 1500) * 1e3, left=row.start * 1e3, height=height,
            color=row.colour, linewidth=0,
        )  # fmt: skip
    for row in _named(rows):
        axes.text(
            (row.start + row.stop) / 2 * 1e3, row.rank + 0.12, _label(row, end),
            ha="center", va="center", fontsize=6.5, color=INK, bbox={"boxstyle": "round,pad=0.15", "facecolor": "white",
            "edgecolor": INK, "linewidth": 0.5},
        )  # fmt: skip
    ticks = [rank + at for rank in range(ranks) for at in (-0.2, 0.12, 0.32)]
    names = [f"{_called(rank, degrees)} computes" for rank in range(ranks)]
    labels = [text for name in names for text in (name, "hands over", "link")]
    axes.set_yticks(ticks, labels, fontsize=8.5, color=INK)
    axes.set(xlim=(0, end * 1e3), ylim=(ranks - 0.45, -0.5))
    axes.set_xlabel("milliseconds", fontsize=9, color=QUIET)
    clear_frame(axes, 8.5)
    _legend(figure, rows)
    return png_of(figure)


def _named(rows: Sequence[TimelineRow]) -> list[TimelineRow]:
    """The buckets that get a number in the picture: all, or none if there are too many."""
    buckets = [row for row in rows if row.kind == "given" and row.label.startswith("bucket")]
    return buckets if len(buckets) <= MOST_NAMED * (1 + max(row.rank for row in rows)) else []


def _label(row: TimelineRow, end: float) -> str:
    """A bucket's number, and its size if the bar has room for it."""
    number, _, size = row.label.removeprefix("bucket ").partition(", ")
    return f"{number}: {size}" if row.stop - row.start > ROOM * end else number


def _legend(figure: Any, rows: Sequence[TimelineRow]) -> None:
    from matplotlib.patches import Patch

    names = {row.label if row.kind == "work" else row.kind for row in rows}
    texts = {
        "wait": "waits for others",
        "given": "hands over a gradient or a bucket",
        "link": "messages under way",
    }
    colours = {name: colour for name, colour in COLOURS.items() if name in names}
    add_legend(figure, [Patch(color=c, label=texts.get(name, name)) for name, c in colours.items()], 8)


class ExchangeTimeline(Callback):
    """Writes <run>/timeline.png and timeline.json at the end of the training: a trace of the step of median length, for
    ui.perfetto.dev. All ranks begin each step of the window together."""

    reads = False

    def __init__(self, run: Run, start: int, steps: int):
        self.run, self._start, self._steps = run, start, steps
        self._first = 0
        self._film: ExchangeTrace | None = None
        self._zero = 0.0
        self.recorded: list[tuple[int, list[TimelineRow]]] = []  # (step, all ranks' rows)

    def start(self, moment: Moment) -> None:
        self._first = moment.progress.step + self._start
        self._begin(moment)

    def step(self, moment: Moment) -> None:
        self._end(moment)
        self._begin(moment)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if refusal.action == "rewind":  # the next record would begin with the update that was undone
            if self._film is not None and heartbeat.tape is self._film:
                heartbeat.end_tape()
            self._film = None

    def end(self, moment: Moment) -> None:
        if self.run.mesh.is_main:
            self._finish(moment)

    def _begin(self, moment: Moment) -> None:
        """Starts recording before an update of the window, unless a measurement is under way. Collective."""
        due = moment.progress.step >= self._first and len(self.recorded) < self._steps
        if not due or heartbeat.tape is not None:
            return
        moment.trainer.learner.exchange.trace()
        self._film = ExchangeTrace(*_waits(self.run.mesh.device))
        self.run.mesh.sum([1.0])  # a barrier, after which all ranks begin
        self._zero = time.monotonic()
        heartbeat.begin_tape(self._film)

    def _end(self, moment: Moment) -> None:
        """Ends recording after the update and gathers all ranks' rows. Collective."""
        film, self._film = self._film, None
        if film is None or heartbeat.tape is not film:  # a measurement has begun meanwhile
            return
        heartbeat.end_tape()
        rows = [
            [kind, label, start - self._zero, stop - self._zero]
            for kind, label, start, stop in (
                *(("work", phase, start, stop) for phase, start, stop in film.spans),
                *(("work" if w[5] else "wait", w[2], w[3], w[4]) for w in film.waits),
                *(("given", label, start, stop) for label, start, stop in film.handovers),
                *(("link", "", start, stop) for start, stop in film.transfers),
                *(("wait", "exchange", start, _end_around(start, film)) for start in film.computed_at),
            )
        ]
        rows_by_rank = enumerate(self.run.mesh.gather(rows))
        activities = [TimelineRow(rank, *row) for rank, rank_rows in rows_by_rank for row in rank_rows]
        self.recorded.append((moment.progress.step, activities))

    def _finish(self, moment: Moment) -> None:
        if not self.recorded:
            measured = moment.progress.step > self._first
            print(MEASURED if measured else _lines.nothing_recorded("timeline", self._first), flush=True)
            return
        by_length = sorted(self.recorded, key=lambda record: max(row.stop for row in record[1]))
        step, rows = by_length[len(by_length) // 2]
        files, folder = Files(), self.run.folder
        files.write(folder / "timeline.json", json.dumps(trace(rows, self.run.mesh.axes)).encode())
        files.write(folder / "timeline.png", draw(rows, f"{self.run.name}, step {step}", self.run.mesh.axes))
        print(
            f"timeline: step {step}, of median length among {len(self.recorded)}. Picture: {folder / 'timeline.png'}; "
            f"for ui.perfetto.dev: {folder / 'timeline.json'}",
            flush=True,
        )


def _end_around(time: float, film: ExchangeTrace) -> float:
    """The end of the span during which the device finished computing, at `time`."""
    spans = [*((start, stop) for _, start, stop in film.spans), *((w[3], w[4]) for w in film.waits)]
    return max((stop for start, stop in spans if start <= time <= stop), default=time)


def _waits(device: str) -> tuple[Any, Any]:
    """Two functions that a trace calls before it reads the clock: one waits for all work of the device, the other only
    for its computation. None on CPUs."""
    if device == "cpu":
        return None, None
    import paddle

    return paddle.device.synchronize, lambda: paddle.device.current_stream().synchronize()
