"""The layout of the ranks, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_dp.mesh.degrees import AXIS_FACTS, Degrees
from paddle_dp.plan.goodput import read_goodput
from paddle_dp.plan.measured import Measured
from paddle_dp.plan.rank_times import RankTimes
from paddle_dp.report.facts import degrees_of, timespan
from paddle_dp.report.html_page import Html, bar, command, details, legend, paragraph, section
from paddle_dp.report.run_record import RunRecord, number
from paddle_dp.text import duration, plural

_COMPONENTS = {
    "forward": 0, "backward": 1, "update": 2, "data": 3, "exchange": 4, "waiting": 7, "callbacks": 6, "other": 5,
}  # fmt: skip
_MOST_DRAWN_RANKS, _MOST_BARS = 64, 8


def layout(run: RunRecord) -> Html:
    degrees = degrees_of(run)
    if degrees is None:
        return ""
    facts = degrees.facts
    roles = {f"{name} {degrees[name]}: ranks {each.role}": each.colour for name, each in facts.items()}
    if not roles:
        return section("Layout", paragraph("One process: nothing is split, and nothing is exchanged."))
    text = f"{plural(degrees.ranks, 'rank')}: {degrees}. A rank is a process; those in one frame share its coordinate."
    if degrees.ranks > _MOST_DRAWN_RANKS:
        picture = paragraph(f"More than {_MOST_DRAWN_RANKS} ranks are not drawn.", "quiet")
    else:
        idle = [rank for rank in range(degrees.ranks) if not degrees.reads(rank)]
        spans = "".join(f'<span class="rank">rank {rank} (server)</span>' for rank in idle)
        frame = _framed("servers", facts["servers"].colour, spans) if spans else ""
        frames = _frames(degrees, degrees.split_axes, {})
        picture = f'<div class="card"><div class="in">{frame}{frames}</div></div>'
    return section("Layout", paragraph(text), picture, legend(roles))


def _frames(degrees: Degrees, axes: Sequence[str], coords: Mapping[str, int]) -> Html:
    if not axes:
        rank = degrees.rank(dict(coords))
        return f'<span class="rank">rank {rank}</span>'
    axis, *inner = axes
    frames = "".join(
        _framed(f"{axis} {i}", AXIS_FACTS[axis].colour, _frames(degrees, inner, {**coords, axis: i}))
        for i in range(degrees[axis])
    )
    return f'<div class="in{" down" * (axis == "pipeline")}">{frames}</div>'


def _framed(name: str, colour: int, content: Html) -> Html:
    return f'<div class="frame c{colour}"><span>{name}</span><div class="in">{content}</div></div>'


def time_shares(run: RunRecord) -> Html:
    body: list[Html] = []
    stalled = sum(number(line.get("seconds_stalled")) or 0.0 for line in run.events.get("saved", ()))
    if run.seconds:
        text = f"The training took {timespan(run.seconds)}, pauses between attempts not counted."
        if stalled:
            share = f"{timespan(stalled)} ({stalled / run.seconds:.0%})"
            text += f" For {share} it stood still to write checkpoints."
        body.append(paragraph(text))
    if goodput := read_goodput(run.folder):
        body.append(paragraph(f"Restarts: {goodput}."))
    line = run.last("measured")
    if not line:
        return section("Where the time went", *body, paragraph(_UNMEASURED, "quiet") if run.events else "")
    measured = Measured.from_fields(line)
    body.append(paragraph(f"A step, as measured over steps {measured.first} to {measured.last}:"))
    drawn = set[str]()
    for times in measured.rank_times[:_MOST_BARS]:
        shares = _shares(times)
        drawn |= {name for name, (share, _) in shares.items() if share > 0.001}
        body.append(f"<small class=quiet>rank {times.rank}, {duration(times.step)}</small>{bar(shares)}")
    body += [
        legend({name: colour for name, colour in _COMPONENTS.items() if name in drawn}),
        details("The numbers, and what would make a step shorter", command("\n".join(measured.report()))),
        paragraph(_EXPLAINED, "quiet"),
    ]
    return section("Where the time went", *body)


_UNMEASURED = "The parts of a step were not measured: that takes a training of more than a few steps."
_EXPLAINED = (
    "exchange: on the wire; waiting: for a slower rank; callbacks: evaluations, checkpoints, screen, files."
)


def _shares(times: RankTimes) -> dict[str, tuple[float, int]]:
    whole = max(times.step, 1e-12)
    return {name: (min(getattr(times, name) / whole, 1.0), colour) for name, colour in _COMPONENTS.items()}
