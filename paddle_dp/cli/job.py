"""Hands a verb's job over to the launcher, and leaves with its status."""

from __future__ import annotations

from typing import Any

import typer


def start(**job: Any) -> None:
    """Carry a job out; what is not given stays as `Job` has it. Raises typer.Exit with the job's status."""
    from paddle_dp.launch.command import Job
    from paddle_dp.launch.start import run

    raise typer.Exit(run(Job(**job)))
