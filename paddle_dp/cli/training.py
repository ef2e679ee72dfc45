"""Verbs that train: `train` itself, and `verify`, which trains a little in two layouts."""

from __future__ import annotations

from typing import Annotated

import typer

from paddle_dp.cli import job
from paddle_dp.cli.options import Devices, Master, NodeRank, Nodes, Out, Overrides, Ranks, RecipeFile, numbers


def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    nodes: Nodes = None,
    master: Master = None,
    node_rank: NodeRank = None,
    out: Out = None,
    resume: Annotated[
        str | None, typer.Option(metavar="[PATH]", help="Go on from the newest checkpoint, or from this one.")
    ] = None,
) -> None:
    """Train a recipe on any number of processes."""
    here = {"ranks": ranks, "devices": numbers(devices), "out": out, "resume": resume}
    nodes_too = {"nodes": nodes, "master": master, "node_rank": node_rank}
    job.start(recipe=recipe, overrides=tuple(overrides or ()), **here, **nodes_too)


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to compare with one.")] = 2,
    steps: Annotated[int, typer.Option(metavar="K", help="How many steps.")] = 8,
) -> None:
    """Run a recipe's first steps on 1 and on N processes and compare losses, gradients and weights."""
    from paddle_dp import proof

    raise typer.Exit(proof.verify(recipe, tuple(overrides or ()), ranks, steps))
