"""Verbs that show a run: `why` prints the last measurement in its metrics.jsonl, `dashboard` opens VisualDL."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paddle_dp.cli.options import RunFolder
from paddle_dp.errors import UsageError
from paddle_dp.plan.changes import changes
from paddle_dp.plan.measured import NOT_MEASURED, Measured


def report(run: Path, json: bool = False) -> str:
    """Returns the lines of a run's last measurement, or one JSON object. Raises UsageError for a run without any."""
    measurement = _last(run)
    measured = Measured.from_fields(measurement)
    if not json:
        return "\n".join(measured.report())
    advice = [asdict(change) for change in changes(measured.rank_times, measured.facts)]
    return json_text.dumps({**measured.as_fields(), "changes": advice}, indent=2)


def _last(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{path} is not there: give a run's folder, such as runs/digits_mlp, whose recipe has the callback "
            "`metrics` (it is one of those by default)."
        )
    measurement, steps = None, 0
    for text in path.read_text().splitlines():
        try:
            line = json_text.loads(text)
        except ValueError:
            continue  # the line is still being written
        steps = max(steps, line.get("step", 0))
        measurement = line if line.get("event") == "measured" else measurement
    if measurement is None:
        raise UsageError(
            f"{path} has no measurement of a step's parts, after {steps} steps. {NOT_MEASURED} Other trainings measure "
            "first after 15 steps, or, if shorter, after a third of their steps; going back to a checkpoint discards "
            "later measurements: train on, or watch it live, paddle-dp train RECIPE --why."
        )
    return measurement


def why(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Show where the time of a run's steps goes, on each rank, and what would make them shorter.

    Reads the run's record, while it runs or afterwards: every training measures a few of its steps, after 10, 100,
    1000, … (docs/why-slow.md). `paddle-dp train --why` shows it every 50 steps.
    """
    typer.echo(report(run, json=json))


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the folder of all runs.")],
    port: Annotated[int, typer.Option(metavar="PORT", help="Where it listens, on 127.0.0.1.")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)
