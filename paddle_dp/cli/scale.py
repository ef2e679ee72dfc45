"""`paddle-dp scale`: measures this machine, and tells what more ranks would give."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

from paddle_dp.cli.options import (  # fmt: skip
    Json,
    Link,
    Measured,
    Overrides,
    Picture,
    RecipeFile,
    check_file,
    option,
    quantity,
    write_picture,
)
from paddle_dp.errors import UsageError
from paddle_dp.units import LinkSpeed


def scale(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, option("N", "Ranks of this machine that are measured together; 2 without it.")
    ] = None,
    last: Annotated[int, option("N", "The most ranks that are foretold.", "--to")] = 64,
    link: Link = None,
    measured: Measured = None,
    probe: Annotated[
        Path | None,
        option("FILE", "Only measure this machine's rates, and write them for `plan --measured FILE`."),
    ] = None,
    png: Picture = None,
    minutes: Annotated[float, option("MINUTES", "The most time for all of it.")] = 5.0,
    json: Json = False,
) -> None:
    """Measure this machine and a few steps on 1 rank and on 2; tell the speed of up to 64 ranks, with bars.

    Weak scaling keeps the recipe's batch on each rank, strong scaling keeps it in all. It answers whether a second card
    pays, prints how far the forecast of the measured ranks was off, and the cheapest changes (docs/plan.md).
    """
    from paddle_dp.doctor.bench import bench_for
    from paddle_dp.doctor.probe import check_machine, measured_rates, measured_scaling
    from paddle_dp.launch.batch_numbers import batch_numbers
    from paddle_dp.launch.plan import check_ranks
    from paddle_dp.launch.silence import import_paddle
    from paddle_dp.plan.probe import Probe
    from paddle_dp.recipe import read_recipe

    if last < 1 or not minutes > 0:
        raise UsageError(f"scale: --to {last} and --minutes {minutes:g}: give numbers above 0.")
    check_file("--probe", probe)
    check_file("--png", png, ".png")
    speed = None if link is None else float(quantity("--link", LinkSpeed, link).bytes_per_second)
    settings = [*(overrides or ())]
    settings += batch_numbers(recipe, settings, 1).overrides
    if read_recipe(recipe, settings).strategy.name == "single":
        settings.append("strategy.use=data_parallel")
    read = read_recipe(recipe, settings)
    count = _ranks_here(read.train.device) if ranks is None else ranks
    check_ranks(count)
    rates = None if measured is None else Probe.read(measured)
    import_paddle()
    from paddle_dp.verbs.scale import probe_lines, product_shapes
    from paddle_dp.verbs.scale_plan import ScalePlan, check_scalable

    if probe is None:
        check_scalable(read)
    with bench_for(count, read.train.device, minutes) as bench:
        if rates is None:
            rates = measured_rates(bench, read.train.precision.dtype, product_shapes(read))
        elif measured is not None:
            check_machine(rates, bench, measured)
        if probe is not None:
            rates.write(probe)
            print(*probe_lines(rates), sep="\n")
            print(f"\n{probe} is written:  paddle-dp plan RECIPE --measured {probe}")
            return
        steps = measured_scaling(bench, recipe, settings, read.train.batch, read.train.micro_batches)
    plan = ScalePlan.make(read, rates, steps, last, speed)
    if png is not None:
        write_picture(png, plan.draw())
    print(json_text.dumps(plan.as_fields(), indent=2) if json else "\n".join(plan.lines()))
    if png is not None and not json:
        print(f"{png} is drawn")


def _ranks_here(device: str) -> int:
    """2, or 1 on a machine with one accelerator."""
    from paddle_dp.launch.machine import Machine

    return 1 if device != "cpu" and len(Machine.here().devices) == 1 else 2
