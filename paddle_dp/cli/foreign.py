"""Verbs for scripts that know nothing of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def audit(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="Any script for paddle.distributed.launch.")
    ],
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to run it on.")] = 2,
    steps: Annotated[
        int, typer.Option(metavar="K", help="Updates to watch in each of the first two epochs.")
    ] = 3,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", help="End the script when it does nothing for so long.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Run a script that knows nothing of paddle_dp on N ranks and tell what is silently wrong with it.

    Options of audit stand before SCRIPT; what stands behind it are the script's own arguments. The script really runs,
    and writes what it writes. Exit status: 0 nothing found, 1 findings, 2 usage, 3 the script itself failed.
    """
    from paddle_dp.audit import Options, audit

    options = Options(ranks=ranks, steps=steps, patience=patience, json=as_json)
    raise typer.Exit(audit(script, context.args, options))
