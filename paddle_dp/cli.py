"""`paddle-dp VERB …`: words only. What a verb does stands in the room that it calls."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import paddle_dp
from paddle_dp.errors import InstallError, PaddleDPError, UsageError

app = typer.Typer(
    name="paddle-dp",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe, such as configs/digits_mlp.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings in place of the recipe's: train.batch=64"),
]
Ranks = Annotated[int | None, typer.Option(metavar="N", help="Processes, on each node.")]
Devices = Annotated[str | None, typer.Option(metavar="0,1,…", help="These GPUs, one process each.")]
Nodes = Annotated[int | None, typer.Option(metavar="N", help="Machines; run the command on each of them.")]
Master = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet: an address of node 0.")
]
NodeRank = Annotated[int | None, typer.Option(metavar="R", help="Which node this is, from 0.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder, in place of runs/<name>.")]


@app.command()
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
    places = {"nodes": nodes, "master": master, "node_rank": node_rank, "out": out, "resume": resume}
    _run(recipe=recipe, overrides=tuple(overrides or ()), ranks=ranks, devices=_numbers(devices), **places)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as runs/digits_mlp.")],
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    checkpoint: Annotated[str, typer.Option(metavar="newest|best|PATH", help="What to evaluate.")] = "newest",
) -> None:
    """Evaluate a run's checkpoint on every held-out sample, each exactly once."""
    from paddle_dp.recipe import resolved

    places = {"ranks": ranks, "devices": _numbers(devices), "out": run}
    chosen = {"checkpoint": checkpoint}
    _run(task="evaluate", recipe=resolved(run), overrides=tuple(overrides or ()), extra=chosen, **places)


@app.command()
def verify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes to compare with one.")] = 2,
    steps: Annotated[int, typer.Option(metavar="K", help="How many steps.")] = 8,
) -> None:
    """Run a recipe's first steps on 1 and on N processes and compare losses, gradients and weights."""
    from paddle_dp import proof

    raise typer.Exit(proof.verify(recipe, tuple(overrides or ()), ranks, steps))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint's.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    checkpoint: Annotated[str, typer.Option(metavar="newest|best|PATH", help="What to merge.")] = "newest",
) -> None:
    """Write a checkpoint of any layout as one safetensors file: the plain one-process model."""
    from paddle_dp import checkpoint as checkpoints

    folder = run / "checkpoints"
    found = checkpoints.find(checkpoint if folder.is_dir() else run, folder)
    typer.echo(f"{out}: {checkpoints.merge(found, out)} tensors of {found}")


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A language model's run: runs/gpt_single.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: as learned.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Draw from the K likeliest only.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equally.")] = 0,
    checkpoint: Annotated[str, typer.Option(metavar="newest|best|PATH", help="Which weights.")] = "newest",
) -> None:
    """Write text on from a prompt with what a language model's run has learned."""
    from paddle_dp.recipe import resolved

    how = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    job = {"task": "generate", "recipe": resolved(run), "overrides": ("strategy.use=single",), "ranks": 1}
    _run(**job, out=run, quiet=True, extra={"prompt": prompt, "checkpoint": checkpoint, **how})


@app.command()
def dashboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or the folder of all runs.")],
    port: Annotated[int, typer.Option(metavar="PORT")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)


@app.command()
def parts(
    shelf: Annotated[str | None, typer.Argument(metavar="SHELF", help="models, datasets, losses, …")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One part of the shelf.")] = None,
) -> None:
    """List the shelves, the parts of one shelf with their settings, or one part."""
    from rich.console import Console

    from paddle_dp.recipe import listing

    Console().print(listing.listing(shelf, name))


@app.command()
def check(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="Recipes to check.")],
) -> None:
    """Check recipes without starting anything: every mistake with its file and line."""
    from paddle_dp.recipe.check import check_all

    raise typer.Exit(check_all(recipes))


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, for editors that know the YAML language server."""
    import json

    from paddle_dp.recipe import json_schema

    print(json.dumps(json_schema(), indent=2))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"paddle-dp {paddle_dp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Distributed training for PaddlePaddle that is provably the single-device run, only faster."""


def main(words: Sequence[str] | None = None) -> None:
    """The console script: a mistake is its message alone on stderr, with its own exit status."""
    try:
        app(args=with_resume_value(sys.argv[1:] if words is None else words), prog_name="paddle-dp")
    except PaddleDPError as error:
        _leave(error)
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            raise
        _leave(InstallError.of_paddle())


def with_resume_value(words: Sequence[str]) -> list[str]:
    """A bare `--resume` means the newest: an option, KEY=VALUE or a recipe behind it is not its value."""
    following = [*words[1:], "-"]
    bare = re.compile(r"-.*|[A-Za-z_][\w.]*=.*|.*\.ya?ml", re.DOTALL)
    return [
        "--resume=newest" if word == "--resume" and bare.fullmatch(after) else word
        for word, after in zip(words, following, strict=True)
    ]


def _numbers(devices: str | None) -> tuple[int, ...] | None:
    if devices is None:
        return None
    words = [word.strip() for word in devices.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--devices {devices}: give GPU numbers separated by commas, such as --devices 0,1.")
    return tuple(map(int, words))


def _run(**job: Any) -> None:
    from paddle_dp.launch.command import Job
    from paddle_dp.launch.supervise import run

    raise typer.Exit(run(Job(**job)))


def _leave(error: PaddleDPError) -> None:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
