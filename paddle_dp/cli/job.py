"""Starts ranks for a verb: a job on any number of ranks, or a query of a run in one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from paddle_dp.launch.command import Job

PLAIN = ("strategy.use=single", "train.precision=float32")  # the plain one-process model
# Verbs that do not train use neither; a callback may need more ranks, and a guard may need a callback.
NO_TRAINING = ("callbacks=[]", "guard={}")


def start(job: Job) -> NoReturn:
    """Runs a job, and exits with its status."""
    from paddle_dp.launch.start import run

    raise typer.Exit(run(job))


def ask(entry_point: str, run: Path, options: Mapping[str, Any], overrides: tuple[str, ...]) -> NoReturn:
    """Calls an entry point with a run's recipe and these options, in one process that prints the result; exits."""
    from paddle_dp.recipe import resolved

    start(
        Job(
            entry_point=entry_point,
            recipe=resolved(run),
            overrides=(*overrides, *NO_TRAINING),
            ranks=1,
            output_dir=run,
            quiet=True,
            extra=options,
        )
    )
