"""Verbs that train: `train` itself, and `verify`, which trains a little in two layouts."""

from __future__ import annotations

from typing import Annotated

import typer

from paddle_dp.cli import job
from paddle_dp.cli.options import (
    Devices,
    Master,
    NodeRank,
    Nodes,
    OutputDir,
    Overrides,
    Ranks,
    RecipeFile,
    numbers,
    words,
)
from paddle_dp.errors import UsageError


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    nodes: Nodes = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: OutputDir = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[PATH]", help="Go on from the newest checkpoint, or from this one.")
    ] = None,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="KEY,…", help="What --resume may find changed: loss,optimizer.clip (docs/checks.md)."
        ),
    ] = None,
) -> None:
    """Train a recipe on any number of processes."""
    here = {"ranks": ranks, "devices": numbers(devices), "output_dir": output_dir, "resume": resume}
    if accept is not None and resume is None:
        raise UsageError(
            f"--accept {accept}: it says what --resume may find changed, and there is no --resume."
        )
    nodes_too = {"nodes": nodes, "master": master, "node_rank": node_rank}
    job.start(
        recipe=recipe,
        overrides=tuple(overrides or ()),
        extra={"accept": words(accept)} if accept else {},
        **here,
        **nodes_too,
    )


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to compare with one.")] = 2,
    steps: Annotated[int, typer.Option(metavar="K", help="How many of the recipe's own steps.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Also an evaluation, a checkpoint, a second epoch and a resume."),
    ] = False,
) -> None:
    """Run a recipe's first steps on 1 and on N processes and compare every gradient and update, and where they differ.

    Two steps in float64, where rounding hides nothing, and K as the recipe has them. What rounding may do is measured
    on one process (docs/proof.md), not chosen.

    Exit status: 0 the same; 1 different; 2 something to type differently, such as a layout that does not fit; 3 nothing
    was learned, so nothing is proven; 4 a side could not be run; 128 + n ended by signal n.
    """
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    from paddle_dp import proof

    status = proof.verify(recipe, tuple(overrides or ()), ranks, steps, as_text=not json, rehearse=rehearse)
    raise typer.Exit(status)
