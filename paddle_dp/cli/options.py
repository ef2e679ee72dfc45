"""Arguments and options that several verbs take, each with its help."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.files import replacing
from paddle_dp.units import Quantity


def at_hand(recipe: Path) -> Path:
    """Returns the recipe's file, or the shipped recipe of that name."""
    from paddle_dp.recipe import shipped

    return shipped.at_hand(recipe)


def argument(metavar: str, text: str, **settings: Any) -> Any:
    """An argument with its help; `settings` are Typer's."""
    return typer.Argument(metavar=metavar, help=text, **settings)


def option(metavar: str, text: str, *names: str, **settings: Any) -> Any:
    """An option with a value, and its help; `names`: if they are not the parameter's; `settings` are Typer's."""
    return typer.Option(*names, metavar=metavar, help=text, **settings)


def flag(text: str, *names: str) -> Any:
    """An option that is on or off, with its help."""
    return typer.Option(*names, help=text)


def folder_option(text: str, metavar: str = "DIR") -> Any:
    """--output-dir; ~ in it is the home folder, which shells do not write into --output-dir=~/runs."""

    def expanded(folder: Path | None) -> Path | None:
        return folder and Path(os.path.expanduser(folder))

    return option(metavar, text, "--output-dir", "--out", callback=expanded)


RecipeFile = Annotated[
    Path,
    argument(
        "RECIPE", "A recipe, such as configs/digits_mlp.yaml, or a shipped one's name.", callback=at_hand
    ),
]
Overrides = Annotated[
    list[str] | None, argument("KEY=VALUE", "Settings in place of the recipe's: train.batch=64")
]
Ranks = Annotated[
    int | None, option("N", "Processes on each node; without it, one for each visible GPU, or one.")
]
Devices = Annotated[
    str | None,
    option(
        "0,1,…",
        "These GPUs or other devices: a process for each, or one for all of them (strategy replicas).",
    ),
]
RanksOrSpan = Annotated[
    str | None,
    option(
        "N|MIN:MAX",
        "Processes on each node; without it, one for each visible GPU, or one. MIN:MAX: as many as can be had.",
    ),
]
_AUTO = "auto: as Slurm, MPI, Kubernetes, Volcano or PaddleJob say."
Nodes = Annotated[str | None, option("N|auto", f"Machines; run the command on each of them. {_AUTO}")]
NodesOrSpan = Annotated[
    str | None,
    option(
        "N|MIN:MAX|auto",
        f"Machines; run the command on each of them. MIN:MAX: continue with fewer while others are lost. {_AUTO}",
    ),
]
Master = Annotated[str | None, option("HOST:PORT", "Where the nodes meet: an address of node 0.")]
NodeRank = Annotated[int | None, option("R", "Which node this is, from 0.")]
OutputDir = Annotated[Path | None, folder_option("The run's folder, in place of runs/<name>.")]
RunFolder = Annotated[Path, argument("RUN", "A run's folder, such as runs/digits_mlp.")]
Json = Annotated[bool, flag("Print one JSON object instead of lines.", "--json")]
Link = Annotated[
    str | None,
    option(
        "SPEED",
        "The network of one machine, all its cards together: '800 Gbit/s'; plan takes a DGX's without it.",
    ),
]
Measured = Annotated[Path | None, option("FILE", "Take the rates that `scale --probe FILE` has measured.")]
Picture = Annotated[Path | None, option("FILE", "Draw it to a .png file, with error bars.")]
Checkpoint = Annotated[str, option("CHECKPOINT", "newest, best, a step or a path.")]
Averaged = Annotated[bool, flag("The averages of the weights (recipe: ema) in their place.", "--ema")]


def numbers(devices: str | None) -> tuple[int, ...] | None:
    """Parses "0,3" as (0, 3). Raises UsageError for anything else."""
    if devices is None:
        return None
    fields = [field.strip() for field in devices.split(",") if field.strip()]
    if not all(field.isdecimal() for field in fields):
        raise UsageError(f"--devices {devices}: give GPU numbers separated by commas, such as --devices 0,1.")
    return tuple(map(int, fields))


def span(option: str, text: str | None) -> tuple[int | None, int | None]:
    """Parses "2:4" as (2, 4) and "4" as (None, 4). Raises UsageError for anything else."""
    if text is None:
        return None, None
    least, colon, most = text.rpartition(":")
    if not most.isdecimal() or (colon and not least.isdecimal()):
        raise UsageError(
            f"{option} {text}: give a number, such as {option} 4, or MIN:MAX, such as {option} 2:4."
        )
    return int(least) if colon else None, int(most)


def node_options(
    nodes: str | None, master: str | None, node_rank: int | None, may_shrink: bool = False
) -> dict[str, Any]:
    """Returns the fields of a Job for --nodes, --master and --node-rank; `auto` takes them from the cluster's engine.

    Raises UsageError for a number that is none, and for one that contradicts the engine.
    """
    from paddle_dp.launch import console
    from paddle_dp.launch.machine import cores
    from paddle_dp.mesh.allocation import allocated, binding, refuse_parallel_tasks, unused_nodes

    least, colon, most = ("" if nodes is None else nodes).rpartition(":")
    if nodes is None:
        refuse_parallel_tasks(
            os.environ,
            "give --nodes auto for one job, with one task on each node, or --nodes 1 if each is a separate job.",
        )
        if sentence := unused_nodes(os.environ):
            console.write(sentence)
    elif most == "auto":
        stated = allocated(os.environ, master, node_rank)
        if sentence := binding(os.environ, cores(), os.cpu_count() or 1):
            console.write(sentence)
        if stated.nodes == 1:
            if least.isdecimal() and int(least) > 1:
                raise UsageError(f"--nodes {nodes}: {stated.engine} has given this job 1 node.")
            return {"nodes": 1}
        nodes, master, node_rank = f"{least}{colon}{stated.nodes}", stated.master, stated.node_rank
    least_nodes, most_nodes = span("--nodes", nodes)
    if least_nodes is not None and not may_shrink:
        raise UsageError(f"--nodes {nodes}: give a number, such as --nodes {most_nodes}.")
    return {"nodes": most_nodes, "least_nodes": least_nodes, "master": master, "node_rank": node_rank}


def quantity(option: str, kind: type[Quantity], text: str) -> Any:
    """Parses an option's quantity. Raises UsageError for a text that is none."""
    try:
        return kind.parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}.") from None


def check_file(option: str, file: Path | None, suffix: str = "") -> None:
    """Raises UsageError for a file that an option is to write, unless it can be written and has the suffix."""
    if file is None:
        return
    if not file.name.endswith(suffix) or file.is_dir() or not file.absolute().parent.is_dir():
        kind = f"{suffix} file" if suffix else "file"
        raise UsageError(f"{option} {file}: give the name of a {kind} in a folder that exists.")


def write_picture(file: Path, picture: bytes) -> None:
    """Writes the file whole or not at all."""
    with replacing(file) as partial:
        partial.write_bytes(picture)


def split_by_comma(text: str) -> list[str]:
    """Parses "loss, optimizer.clip" as ["loss", "optimizer.clip"]."""
    return [key.strip() for key in text.split(",") if key.strip()]


def recipes_and_settings(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates recipe files from KEY=VALUE settings, for a verb that takes several recipes."""
    settings = [argument for argument in arguments if re.match(r"[A-Za-z_][\w.]*=", argument)]
    return [at_hand(Path(argument)) for argument in arguments if argument not in settings], settings


def require(option: str, extra: str, *packages: str) -> None:
    """Raises InstallError, with the command that installs them, when packages that an option needs are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise InstallError(
            f"{option} needs {' and '.join(missing)}: pip install 'paddle_dp[{extra}]', "
            f"or pip install {' '.join(missing)}."
        )
