"""Verbs that show a run: why, dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paddle_dp.cli.options import RunFolder


def why(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Tell where the time of a run's steps goes, on each rank, and what would make them shorter.

    Reads what the run has recorded, while it runs or afterwards: every training measures a few of its steps, after 10,
    100, 1000, … (docs/why-slow.md). `paddle-dp train --why` shows it every 50 steps.
    """
    from paddle_dp.cli.why import told

    typer.echo(told(run, json=json))


def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the folder of all runs.")],
    port: Annotated[int, typer.Option(metavar="PORT", help="Where it listens, on 127.0.0.1.")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)
