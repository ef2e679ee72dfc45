"""The results of a sweep: the table, the picture of scores, the page that compares trials, the best one's commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paddle_dp.errors import UsageError
from paddle_dp.figures import new_figure, png_of
from paddle_dp.files import replacing
from paddle_dp.launch import console
from paddle_dp.launch.command import typed
from paddle_dp.report.comparison import read_runs, write_comparison
from paddle_dp.report.run_record import RunRecord, read_run
from paddle_dp.sweep.search import TrialRecord
from paddle_dp.sweep.space import Axis, labels, shown
from paddle_dp.sweep.trial import folder_of
from paddle_dp.text import numbered

if TYPE_CHECKING:
    from paddle_dp.sweep.request import SweepPlan

PICTURE, PAGE = "sweep.png", "compare.html"
_COLOURS = {"done": "#2f6fb2", "stopped": "#2f6fb2", "pruned": "#b8c4d0"}
_BEST = "#d1495b"
_MOST_COMPARED = 12  # runs on the page: the best ones


def ranked(plan: SweepPlan, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials with a score, the best first; of equal ones the earliest."""
    scored = [record for record in records if record.score is not None]
    return sorted(scored, key=lambda record: record.score or 0.0, reverse=not plan.smaller)


def show(plan: SweepPlan, records: Sequence[TrialRecord]) -> None:
    """Prints the table, writes the picture and the page, and prints where they are and how to go on."""
    if not records:
        return
    order = ranked(plan, records)
    Console().print(table(plan, [*order, *(record for record in records if record not in order)]))
    if not order:
        return
    best = read_run(folder_of(plan.folder, order[0].number))
    console.write(
        f"best: trial {order[0].number}, {plan.score} {best.shown(plan.score, order[0].score or 0.0)}"
    )
    if sentence := chance(plan, order, best):
        console.write(sentence)
    picture, page, command = _write_picture(plan, order), _write_page(plan, order), further(plan, best)
    for name, text in (("picture", picture), ("trials compared", page), ("train it further", command)):
        if text:
            console.write(f"  {name:<18}{text}")


def table(plan: SweepPlan, records: Sequence[TrialRecord]) -> Table:
    rows = Table(box=SIMPLE_HEAD)
    for name in ("trial", *labels(plan.axes), plan.score, "at step", "end", "s"):
        rows.add_column(name, overflow="fold")
    for record in records:
        facts = record.facts
        score = "–" if record.score is None else f"{record.score:.4f}"
        end = "loser" if record.state == "pruned" else record.state
        if record.state in ("pruned", "stopped"):
            end += f", {facts.get('last_step')}"
        cells = [str(record.number), *map(shown, record.settings), score]
        cells += [str(facts.get("step", "–")), end, f"{facts.get('seconds', 0):.0f}"]
        rows.add_row(*map(Text, cells))
    return rows


def chance(plan: SweepPlan, order: Sequence[TrialRecord], best: RunRecord) -> str:
    """A sentence if other trials are as good as the best one within its 95 % interval: the best of several scores of
    the same held-out samples is also the luckiest."""
    limits = best.bounds(plan.score, order[0].score or 0.0)
    if limits is None:
        return ""
    near = [record.number for record in order[1:] if (record.score or 0.0) >= limits[0]]
    if not near:
        return ""
    return (
        f"By chance {numbered('trial', near)} may be as good: {plan.score} is in the best one's 95 % "
        "interval, and the best of several is also the luckiest. Other held-out samples, or seeds, would tell."
    )


def further(plan: SweepPlan, best: RunRecord) -> str:
    """The command that trains a trial further: on as many ranks, and twice as long if it has come to its end."""
    words = ["paddle-dp", "train", typed(best.folder / "recipe.yaml"), "--ranks", str(plan.request.ranks)]
    return shlex.join([*words, "--resume", *_longer(best)])


def _longer(best: RunRecord) -> list[str]:
    length = str((best.recipe.get("train") or {}).get("length", ""))
    count, _, unit = length.partition(" ")
    if best.ending[0] != "done" or not count.isdecimal() or not unit:
        return []
    return [f"train.length={2 * int(count)} {unit.rstrip('s')}s", "--accept", "train.length"]


def _write_page(plan: SweepPlan, order: Sequence[TrialRecord]) -> str:
    """Writes the comparison of the best trials; returns its path, and how many it has if not all."""
    compared = order[:_MOST_COMPARED]
    if len(compared) < 2:
        return ""
    path = plan.folder / PAGE
    try:
        write_comparison(read_runs([folder_of(plan.folder, record.number) for record in compared]), path)
    except UsageError as error:
        console.write(str(error))
        return ""
    return str(path) + (f" (the best {len(compared)})" if len(compared) < len(order) else "")


def _write_picture(plan: SweepPlan, order: Sequence[TrialRecord]) -> str:
    """Writes the picture: the score of each trial in the order of trials, and over each axis."""
    scored, best = sorted(order, key=lambda record: record.number), order[0]
    count = 1 + len(plan.axes)
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure = new_figure(4.2 * columns, 3.4 * rows, dpi=120, layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel in panels[count:]:
        panel.set_axis_off()
    _draw_history(panels[0], plan, scored, best)
    for number, (axis, name) in enumerate(zip(plan.axes, labels(plan.axes), strict=True)):
        _draw_axis(panels[number + 1], axis, number, scored, best)
        panels[number + 1].set_xlabel(name)
    for panel in panels[0:count:columns]:
        panel.set_ylabel(plan.score)
    figure.suptitle(
        f"best: trial {best.number}, {plan.score} {best.score:.4f}", x=0.01, ha="left", fontsize=11, weight="bold"
    )  # fmt: skip
    path = plan.folder / PICTURE
    with replacing(path) as partial:
        partial.write_bytes(png_of(figure))
    return str(path)


def _draw_points(panel: Any, xs: Sequence[Any], scored: Sequence[TrialRecord], best: TrialRecord) -> None:
    colours = [_BEST if record is best else _COLOURS[record.state] for record in scored]
    panel.scatter(xs, [record.score for record in scored], c=colours, s=30, zorder=3)
    panel.grid(color="#e6eaee", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_history(panel: Any, plan: SweepPlan, scored: Sequence[TrialRecord], best: TrialRecord) -> None:
    """The score of each trial, and the best until then."""
    from matplotlib.ticker import MaxNLocator

    xs = [record.number for record in scored]
    _draw_points(panel, xs, scored, best)
    better = min if plan.smaller else max
    line = [better(r.score or 0.0 for r in scored[: n + 1]) for n in range(len(scored))]
    panel.step(xs, line, where="post", color=_BEST, linewidth=1, label="best so far")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_xlabel("trial (grey: ended early)" if any(r.state == "pruned" for r in scored) else "trial")
    panel.legend(frameon=False, fontsize=8)


def _draw_axis(panel: Any, axis: Axis, number: int, scored: Sequence[TrialRecord], best: TrialRecord) -> None:
    """The score over the values of an axis: choices at equal distances, ranges to their scale."""
    values = [record.settings[number] for record in scored]
    if axis.choices:
        _draw_points(panel, [axis.choices.index(value) for value in values], scored, best)
        panel.set_xticks(range(len(axis.choices)), [shown(choice)[:18] for choice in axis.choices])
        panel.set_xlim(-0.5, len(axis.choices) - 0.5)
        return
    _draw_points(panel, [float(value) for value in values], scored, best)
    if axis.log:
        panel.set_xscale("log")
