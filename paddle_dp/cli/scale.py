"""`paddle-dp scale`: measures this machine, and tells what more ranks would give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paddle_dp.cli.options import Overrides, RecipeFile
from paddle_dp.errors import UsageError


def scale(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Ranks of this machine that are measured together.")
    ] = 2,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only measure this machine's rates, and write them for `plan --measured FILE`.",
        ),
    ] = None,
) -> None:
    """Measure this machine for a recipe (docs/plan.md): products by shape, kernels, collectives."""
    from paddle_dp.doctor.probe import bench_for, measured_rates
    from paddle_dp.launch.plan import check_ranks
    from paddle_dp.launch.silence import import_paddle
    from paddle_dp.recipe import read_recipe

    check_ranks(ranks)
    read = read_recipe(recipe, overrides or ())
    if probe is None:
        raise UsageError("scale: give --probe FILE.")
    if not probe.absolute().parent.is_dir():
        raise UsageError(f"--probe {probe}: give a file in a folder that exists, such as probe.json.")
    import_paddle()
    from paddle_dp.verbs.scale import probe_lines, product_shapes

    with bench_for(ranks, read.train.device, minutes=2.0) as bench:
        rates = measured_rates(bench, read.train.precision.dtype, product_shapes(read))
    rates.write(probe)
    print(*probe_lines(rates), sep="\n")
    print(f"\n{probe} is written:  paddle-dp plan RECIPE --measured {probe}")
