"""Verbs about what a run has learned: measure it, take it out, let it write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paddle_dp.cli import job
from paddle_dp.cli.options import Checkpoint, Devices, Overrides, Ranks, Run, numbers, require


def evaluate(
    run: Run,
    overrides: Overrides = None,
    ranks: Ranks = None,
    devices: Devices = None,
    checkpoint: Checkpoint = "newest",
) -> None:
    """Evaluate a run's checkpoint on every held-out sample, each exactly once."""
    from paddle_dp.recipe import resolved

    places = {"ranks": ranks, "devices": numbers(devices), "output_dir": run}
    chosen = {"checkpoint": checkpoint}
    job.start(task="evaluate", recipe=resolved(run), overrides=tuple(overrides or ()), extra=chosen, **places)


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint's.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The file to write.")],
    checkpoint: Checkpoint = "newest",
) -> None:
    """Write a checkpoint of any layout as one safetensors file: the plain one-process model."""
    from paddle_dp import checkpoint as checkpoints

    folder = run / "checkpoints"
    found = checkpoints.find(checkpoint if folder.is_dir() else run, folder)
    typer.echo(f"{out}: {checkpoints.merge(found, out)} tensors of {found}")


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A language model's run: runs/gpt_single.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; 1: as learned.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Draw from the K likeliest only.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds draw equally.")] = 0,
    checkpoint: Checkpoint = "newest",
) -> None:
    """Write text on from a prompt with what a language model's run has learned."""
    from paddle_dp.recipe import resolved

    how = {"tokens": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    alone = {"recipe": resolved(run), "overrides": ("strategy.use=single",), "ranks": 1, "output_dir": run}
    job.start(task="generate", **alone, quiet=True, extra={"prompt": prompt, "checkpoint": checkpoint, **how})


def export(
    run: Run,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to; by default RUN/export.")
    ] = None,
    checkpoint: Checkpoint = "newest",
    onnx: Annotated[bool, typer.Option("--onnx", help="Also write model.onnx, through paddle2onnx.")] = False,
) -> None:
    """Write a run's model as a program that runs without this package, proven equal to the model."""
    from paddle_dp.recipe import resolved

    if onnx:
        require("--onnx", "onnx", "paddle2onnx", "onnxruntime")
    plain = ("strategy.use=single", "train.precision=float32")
    alone = {"recipe": resolved(run), "overrides": plain, "ranks": 1, "output_dir": run}
    options = {"to": None if out is None else str(out), "checkpoint": checkpoint, "onnx": onnx}
    job.start(task="export", **alone, quiet=True, extra=options)
