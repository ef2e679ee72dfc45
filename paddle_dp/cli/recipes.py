"""Verbs to call before a training: parts, check, plan, new, import, doctor, schema."""

from __future__ import annotations

import json as json_text
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paddle_dp.cli.options import (  # fmt: skip
    Json,
    Link,
    Master,
    Measured,
    NodeRank,
    Nodes,
    Overrides,
    Picture,
    RecipeFile,
    argument,
    check_file,
    flag,
    folder_option,
    node_options,
    option,
    quantity,
    recipes_and_settings,
    write_picture,
)
from paddle_dp.errors import UsageError
from paddle_dp.units import Bytes, Duration, LinkSpeed

if TYPE_CHECKING:
    from paddle_dp.plan.devices import Device
    from paddle_dp.plan.probe import Probe
    from paddle_dp.recipe import Recipe


def parts(
    shelf: Annotated[str | None, argument("SHELF", "models, datasets, losses, …")] = None,
    name: Annotated[str | None, argument("NAME", "One part of the shelf.")] = None,
) -> None:
    """List the shelves, the parts of one shelf with their settings, or one part."""
    from rich.console import Console

    from paddle_dp.recipe import listing

    Console().print(listing.listing(shelf, name))


def check(
    arguments: Annotated[
        list[str], argument("RECIPE… [KEY=VALUE…]", "Recipes to check, and other settings.")
    ],
    ranks: Annotated[int | None, option("N", "Also print a rank's memory and traffic on N ranks.")] = None,
    build: Annotated[int | None, option("RANK", "Also build the share of this rank of --ranks.")] = None,
    link: Annotated[
        str | None, option("SPEED", "Also print how long a step's exchange takes: '10 Gbit/s'.")
    ] = None,
    compute: Annotated[
        str | None, option("TIME", "Also print the shortest step for this compute time: '60 ms'.")
    ] = None,
    memory: Annotated[
        str | None, option("SIZE", "Also print from how many ranks on each fits into so much: '80 GB'.")
    ] = None,
    run: Annotated[
        bool, flag("Open the data, and run the model on its first samples.", "--run/--no-run")
    ] = True,
) -> None:
    """Check recipes without starting a training: every mistake with its file and line; and plan the share of each rank.

    A separate process on the CPU reads the first samples, and runs the model (of up to 30 million parameters) and the
    loss on them, for 30 s at most: it refuses what train would refuse. --no-run reads only the recipe, for a machine
    that has no data.
    """
    from paddle_dp.launch.batch_numbers import batch_numbers
    from paddle_dp.launch.check_process import CheckProcess
    from paddle_dp.launch.initial import check_weights
    from paddle_dp.recipe import read_recipe
    from paddle_dp.recipe.check import check_all

    files, settings = recipes_and_settings(arguments)

    @cache
    def settings_of(file: Path, count: int | None = ranks) -> tuple[Sequence[str], Sequence[str]]:
        numbers = batch_numbers(file, settings, count)
        return (*settings, *numbers.overrides), numbers.remarks

    def on(file: Path, count: int) -> Recipe:
        return read_recipe(file, settings_of(file, count)[0])

    with CheckProcess() as tried:

        def trial_lines(recipe: Recipe, file: Path) -> list[str]:
            lines = check_weights(recipe.load, recipe.model) if recipe.load is not None else []
            return [*lines, *tried(file, settings_of(file)[0])] if run else lines

        status = check_all(
            files, settings, _forecast(ranks, build, link, compute, memory, on), trial_lines, settings_of
        )
    raise typer.Exit(status)


def _forecast(
    ranks: int | None,
    build: int | None,
    link: str | None,
    compute: str | None,
    memory: str | None,
    on: Callable[[Path, int], Recipe],
) -> Callable[[Recipe, Path], Iterator[str]] | None:
    """Returns the function for the lines that `check --ranks` and `--memory` add to a recipe's; None without both.
    `on`: the recipe in a file on so many ranks."""
    for name, value in (("--build", build), ("--link", link), ("--compute", compute)):
        if value is not None and ranks is None:
            raise UsageError(f"{name} {value} needs --ranks N: how many ranks there are.")
    if memory is not None:
        from paddle_dp.launch.silence import import_paddle

        size = quantity("--memory", Bytes, memory).count
        import_paddle()
        from paddle_dp.verbs.scale import fits_from

        others = None if ranks is None else _forecast(ranks, build, link, compute, None, on)
        return lambda recipe, file: chain(
            others(recipe, file) if others else (), fits_from(recipe, size, partial(on, file))
        )
    if ranks is None:
        return None
    if compute is not None and link is None:
        raise UsageError(f"--compute {compute} needs --link SPEED: the speed of the ranks' network.")
    from paddle_dp.launch.plan import check_ranks
    from paddle_dp.launch.silence import import_paddle

    check_ranks(ranks)
    import_paddle()
    from paddle_dp.plan.bound import Compute, Wire
    from paddle_dp.verbs.check_screen import forecast

    wire = None
    if link is not None:
        speed = quantity("--link", LinkSpeed, link)
        seconds = None if compute is None else quantity("--compute", Duration, compute).seconds
        wire = Wire(link=speed, compute=None if seconds is None else Compute.from_seconds(seconds))
    return lambda recipe, _: forecast(recipe, ranks, build, wire)


def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[
        str, option("N|MIN..MAX", "Cards: 64; several: 8,12,16; 1..64: 1, 2, 4 … 64.")
    ] = "1..64",
    device: Annotated[
        str | None,
        option(
            "DEVICE", "a100-80, a100-40, a800-80, h100, h800, h200, v100-32, v100-16; a100-80 without it."
        ),
    ] = None,
    measured: Measured = None,
    link: Link = None,
    node: Annotated[int | None, option("N", "Cards in a node; 8 without it.")] = None,
    price: Annotated[str | None, option("P", "Of one card for one hour.")] = None,
    write: Annotated[Path | None, option("DIR", "Write the recipe of the layout marked → there.")] = None,
    png: Picture = None,
    try_: Annotated[
        int | None,
        option("N", "Train the first N layouts here for some steps, and say who was right.", "--try"),
    ] = None,
    json: Json = False,
) -> None:
    """Rank every layout of a recipe on cards that are not here, by arithmetic: seconds of a step with the bar
    within which 8 of 10 published runs lay, bytes, hours, card-hours, price (docs/plan.md).

    Tied layouts share a rank. One number of cards gets a table; several get a line each.
    """
    from paddle_dp.launch.silence import import_paddle
    from paddle_dp.plan.probe import Probe

    if device is not None and measured is not None:
        raise UsageError(f"--device {device} and --measured {measured} are two devices: give one of them.")
    probe = None if measured is None else Probe.read(measured)
    chosen = _planned_device(device, probe, link, node)
    cost = None if price is None else _price(price)
    check_file("--png", png, ".png")
    import_paddle()
    from paddle_dp.doctor.layout_trial import check_trial, trial, trial_fields, trial_lines
    from paddle_dp.verbs.layout_plan import RecipePlan, rank_numbers, start_command, write_chosen
    from paddle_dp.verbs.plan_picture import draw_plan
    from paddle_dp.verbs.plan_screen import PlanScreen

    numbers = rank_numbers(ranks)
    if write is not None and len(numbers) > 1:
        raise UsageError(f"--write {write} writes one recipe: give one number of cards, such as --ranks 64.")
    if try_ is not None and len(numbers) > 1:
        raise UsageError(f"--try {try_} runs one number of ranks: give it, such as --ranks 2.")
    _positive("--try", 1 if try_ is None else try_)
    planned = RecipePlan.make(recipe, overrides or (), numbers, chosen, cost, probe)
    if try_ is not None:
        check_trial(planned, probe)
    path = None if write is None else write_chosen(planned, recipe, overrides or (), write)
    if png is not None:
        write_picture(png, draw_plan(planned))
    tried = None if try_ is None else trial(planned, recipe, overrides or (), try_)
    if json:
        fields = planned.as_fields() | {"written": None if path is None else str(path)}
        print(json_text.dumps(fields | ({} if tried is None else {"tried": trial_fields(tried)}), indent=2))
        return
    print(*PlanScreen(planned).lines(), sep="\n")
    if tried is not None:
        print("", *trial_lines(tried), sep="\n")
    if path is not None:
        print(f"\n{path} is written:  {start_command(path, numbers[0], chosen.node)}")


def _price(text: str) -> float:
    """Raises UsageError for a text that is no price."""
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price <= 1e6:
        raise UsageError(
            f"--price {text}: give the price of one card for one hour as a plain number, such as 2.5."
        )
    return price


def _planned_device(name: str | None, probe: Probe | None, link: str | None, node: int | None) -> Device:
    from dataclasses import replace

    from paddle_dp.plan.devices import device_named

    chosen = device_named("a100-80" if name is None else name) if probe is None else probe.device()
    if link is not None:
        speed = quantity("--link", LinkSpeed, link).bytes_per_second
        chosen = replace(chosen, node_link=speed, family="")  # no published run has this network
    if node is not None:
        chosen = replace(chosen, node=_positive("--node", node), family="")
    return chosen


def _positive(option: str, number: int) -> int:
    if number < 1:
        raise UsageError(f"{option} {number}: give 1 or more.")
    return number


def new(
    folder: Annotated[Path, argument("DIR", "Where the copies go: DIR/configs, DIR/models.")],
    recipe: Annotated[str, option("NAME", "Which shipped recipe to begin from.")] = "digits_mlp",
) -> None:
    """Copy a shipped recipe and its model into your folder, to begin from."""
    from paddle_dp.recipe import shipped

    copies = shipped.copy(recipe, folder)
    print(*copies, sep="\n")
    where = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"{where}{shipped.command(copies[0])}")


def import_(
    file: Annotated[Path, argument("FILE", "YAML, JSON, or a script with options.")],
    ranks: Annotated[
        int | None, option("N", "For how many cards it is written: its batch size is for one.")
    ] = None,
    model: Annotated[
        Path | None, option("FOLDER", "The folder of the language model's config.json, if FILE names none.")
    ] = None,
    out: Annotated[
        Path | None, option("RECIPE", "The recipe to write; NAME.yaml here without it.", "--out")
    ] = None,
    strict: Annotated[
        bool, flag("Write nothing if a key that changes the training has no counterpart.", "--strict")
    ] = False,
) -> None:
    """Make a recipe of a training of PaddleClas, PaddleNLP, PaddleFormers or Hugging Face's Trainer, key by key.

    Comments in the recipe name each key without a counterpart. The screen names those that are not honoured, so that
    something else is learned.
    """
    from paddle_dp.coming_from.importer import import_recipe

    print(*import_recipe(file, ranks, out, strict, model).lines(), sep="\n")


import_.__name__ = "import"  # the verb's name, which Python allows no function


def doctor(
    ranks: Annotated[
        int | None,
        option(
            "N", "Processes that are to run on this machine; without it 2, with --prove one for each device."
        ),
    ] = None,
    nodes: Nodes = None,
    master: Master = None,
    node_rank: NodeRank = None,
    output_dir: Annotated[
        Path | None,
        folder_option(
            "Where the runs are to be; with --prove the file, in place of paddle-dp-proof.json.", "DIR|FILE"
        ),
    ] = None,
    json: Json = False,
    prove: Annotated[
        bool,
        flag(
            "Prove layouts, precisions and a resume on this machine's devices, measure speed and memory, and "
            "write a file to send (docs/gpus.md).",
            "--prove",
        ),
    ] = False,
    minutes: Annotated[float | None, option("MINUTES", "The most time for --prove; 30 without it.")] = None,
) -> None:
    """Examine this machine: Paddle, devices, memory, disk, network, and a real exchange between ranks.

    With --nodes, run it on each of them, as the training: the nodes meet, and compare their clocks.

    Exit status: 0 ready; 1 something to mend, with what to do; 2 something to type differently. With --prove: 0 nothing
    differs; 1 something differs or failed; 130 Ctrl-C: the file has the rows so far.
    """
    from paddle_dp.doctor.examine import examine
    from paddle_dp.launch.command import Job

    if prove:
        from paddle_dp.doctor.prove import DEFAULT_FILE
        from paddle_dp.doctor.prove import prove as run_proof
        from paddle_dp.doctor.prove_steps import STEPS

        if nodes is not None or master is not None:
            raise UsageError(
                "--prove examines one machine: run it without --nodes and --master, on each of them."
            )
        most = 30.0 if minutes is None else minutes
        raise typer.Exit(run_proof(STEPS, ranks, most, output_dir or DEFAULT_FILE, json))
    if minutes is not None:
        raise UsageError(f"--minutes {minutes:g} needs --prove: it is the most time for that proof.")
    job = Job(
        ranks=2 if ranks is None else ranks,
        output_dir=output_dir or Path("runs"),
        quiet=True,
        **(node_options(nodes, master, node_rank) if nodes or master else {}),
    )
    raise typer.Exit(examine(job, as_json=json))


def schema() -> None:
    """Print the JSON schema of a recipe, for editors that know the YAML language server."""
    from paddle_dp.recipe import json_schema

    print(json_text.dumps(json_schema(), indent=2))
