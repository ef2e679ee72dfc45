"""Verbs that prove: verify, audit, certificate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paddle_dp.cli.options import Overrides, RecipeFile, RunFolder, argument, flag, option
from paddle_dp.errors import PaddleDPError

NOT_RUN = 4  # as proof.sides
UNEXPECTED = 70  # as EX_SOFTWARE of sysexits.h: an error of the program, which is no verdict


def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[int, option("N", "Processes to compare with one.")] = 2,
    steps: Annotated[int, option("K", "How many of the recipe's steps.")] = 8,
    json: Annotated[bool, flag("Print one JSON object instead of tables.", "--json")] = False,
    rehearse: Annotated[
        bool, flag("Also an evaluation, a checkpoint, two more epochs and a resume.", "--rehearse")
    ] = False,
    at: Annotated[
        str | None,
        option(
            "STEP|CHECKPOINT",
            "Compare the steps after a checkpoint: a path, or the newest of the recipe's run up to STEP.",
        ),
    ] = None,
) -> None:
    """Run a recipe's first steps on 1 and on N processes, compare every gradient and update, and say where they differ.

    Two steps run in float64, where rounding hides nothing, and K in the recipe's precision. The rounding allowed is
    measured on one process, not chosen (docs/proof.md).

    Exit status: 0 the same; 1 different; 2 something to type differently, such as a layout that does not fit; 3 nothing
    was learned, or noise would hide a fault of 10 % of a gradient, so nothing is proven; 4 a side could not be run; 70
    verify itself failed; 128 + n ended by signal n.
    """
    import traceback

    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    from paddle_dp import proof
    from paddle_dp.launch.batch_numbers import batch_numbers

    try:
        settings = tuple(overrides or ())
        numbers = batch_numbers(recipe, settings, ranks)
        print(*numbers.remarks, sep="\n", end="\n" if numbers.remarks else "", file=sys.stderr, flush=True)
        status = proof.verify(
            recipe, (*settings, *numbers.overrides), ranks, steps, as_text=not json, rehearse=rehearse, at=at
        )
    except PaddleDPError as error:
        if error.exit_status == 1:  # which is "different"
            error.exit_status = NOT_RUN
        raise
    except Exception:  # noqa: BLE001 - an unexpected error is no verdict
        traceback.print_exc()
        status = UNEXPECTED
    raise typer.Exit(status)


def audit(
    context: typer.Context,
    script: Annotated[Path, argument("SCRIPT", "Any script for paddle.distributed.launch.")],
    ranks: Annotated[int, option("N", "Processes to run it on.")] = 2,
    steps: Annotated[int, option("K", "Updates to watch in each of the first two epochs.")] = 3,
    patience: Annotated[float, option("SECONDS", "End the script when it does nothing for so long.")] = 120.0,
    as_json: Annotated[bool, flag("Print the report as JSON.", "--json")] = False,
) -> None:
    """Run a script that knows nothing of paddle_dp on N ranks and report its silent mistakes.

    Options of audit stand before SCRIPT; all arguments after SCRIPT are passed to it. The script really runs, and
    writes all its files.

    Exit status: 0 nothing found; 1 findings; 2 something to type differently; 3 the script itself failed.
    """
    from paddle_dp.audit import Script, audit

    raise typer.Exit(audit(Script(script, tuple(context.args), steps, patience), ranks, as_json))


def certificate(
    run: RunFolder,
    replay: Annotated[
        int, option("N", "Train N intervals between checkpoints again; of many, evenly spread.", min=0)
    ] = 0,
    step: Annotated[int | None, option("STEP", "Train again up to this update.", min=1)] = None,
    steps: Annotated[int | None, option("K", "No more updates of an interval than K.", min=1)] = None,
) -> None:
    """Show a run's certificate, check its checkpoints against it, and train parts of the run again on one process.

    The certificate names the data, the versions, every attempt with its number of ranks, and a digest of the weights at
    each checkpoint, the same in any layout. An interval is trained from the checkpoint before it; losses and weights
    are compared with the run's record, in units of the rounding noise of one process (docs/proof.md).

    Intervals lie between checkpoints that still exist: with keep: 3 the first interval reaches from the beginning to
    the oldest of three, and may take most of the run's time. --steps K ends each after K updates.

    Exit status: 0 all as certified; 1 something is not; 2 something to type differently; 4 the training failed.
    """
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    from paddle_dp.proof import certified

    raise typer.Exit(certified.certificate(run, replay, step, steps))
