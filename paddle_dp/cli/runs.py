"""Verbs that read runs: why, report, compare, dashboard, and with trained weights merge, generate, predict, export."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paddle_dp.cli.options import Averaged, Checkpoint, Json, RunFolder, argument, flag, option, require
from paddle_dp.cli.training import NO_TRAINING, start
from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job
from paddle_dp.mesh.late_ranks import longest_wait
from paddle_dp.plan.changes import changes
from paddle_dp.plan.goodput import read_goodput
from paddle_dp.plan.measured import NOT_MEASURED, Measured

PLAIN = ("strategy.use=single", "train.precision=float32")  # the plain one-process model


def step_report(run: Path, json: bool = False) -> str:
    """Returns the lines of a run's goodput, if it was restarted, longest wait and last measurement, or one JSON object.
    Raises UsageError for a run without any."""
    goodput = read_goodput(run)
    lines = [f"{goodput}.".replace(", ", ",\n  ")] if goodput else []
    fields: dict[str, Any] = {"restarts": goodput.as_fields()} if goodput else {}
    if wait := longest_wait(run):
        lines.append(f"The longest wait:\n  {wait}.")
        fields["longest_wait"] = wait
    try:
        measurement = _last(run)
    except UsageError as error:
        if not lines:
            raise
        return json_text.dumps(fields, indent=2) if json else "\n".join([*lines, str(error)])
    measured = Measured.from_fields(measurement)
    if not json:
        return "\n".join([*lines, *measured.report()])
    advice = [asdict(change) for change in changes(measured.rank_times, measured.facts)]
    return json_text.dumps({**measured.as_fields(), "changes": advice, **fields}, indent=2)


def _last(run: Path) -> dict[str, Any]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{path} is not there: give a run's folder, such as runs/digits_mlp, whose recipe has the callback "
            "`metrics` (it is one of those by default)."
        )
    measurement, steps = None, 0
    for text in path.read_text().splitlines():
        try:
            line = json_text.loads(text)
        except ValueError:
            continue  # the line is still being written
        steps = max(steps, line.get("step", 0))
        measurement = line if line.get("event") == "measured" else measurement
    if measurement is None:
        raise UsageError(
            f"{path} has no measurement of a step's parts, after {steps} steps. {NOT_MEASURED} Other trainings measure "
            "their steps 11 to 30 first, or, if shorter, those after a third of them; going back to a checkpoint "
            "discards later measurements: train on, or watch it live, paddle-dp train RECIPE --why."
        )
    return measurement


def why(run: RunFolder, json: Json = False) -> None:
    """Show where the time of a run's steps goes, on each rank, and ways to make them shorter.

    A run that was restarted shows its goodput first: the share of its wall time in updates that count. A run whose
    ranks waited once for 20 s or longer for a late rank shows the longest of these waits.
    Reads the run's record, while it runs or afterwards: every training measures a few of its steps, ever more
    rarely (docs/why-slow.md). `paddle-dp train --why` shows it every 50 steps.
    """
    typer.echo(step_report(run, json=json))


def report(run: RunFolder) -> None:
    """Write RUN/report.html: curves, scores, mistakes by class, proof, times, failures, recipe, as one file.

    Every training writes it at its end; this verb writes it again, also while a training runs (docs/report.md).
    """
    from paddle_dp.report.report import NAME, write_report

    try:
        typer.echo(write_report(run))
    except OSError as error:
        raise UsageError(f"{run / NAME} cannot be written: {error.strerror}.") from None


def compare(
    runs: Annotated[list[Path], argument("RUNS…", "Folders of two runs or more.")],
    html: Annotated[
        Path | None, option("FILE", "Also write a page with curves to this file.", "--html")
    ] = None,
) -> None:
    """Compare runs: the settings that differ, final and best scores, and with --html their curves.

    The page shows each quantity over steps, samples, seconds and bytes sent, as far as the runs have recorded them
    (docs/report.md).
    """
    from paddle_dp.report.comparison import read_runs, tables, write_comparison

    comparison = read_runs(runs)
    if html is not None:
        write_comparison(comparison, html)
    console = Console()
    for title, head, rows in tables(comparison):
        shown = Table(*head, title=title, title_justify="left", box=SIMPLE_HEAD)
        for row in rows:
            shown.add_row(*map(Text, row))
        console.print(shown if rows else Text(f"{title}: none"))
    for sentence in comparison.warnings:
        console.print(Text(sentence))
    if html is not None:
        console.print(Text(f"written to {html}"), soft_wrap=True)


def dashboard(
    folder: Annotated[Path, argument("DIR", "A run's folder, or the folder of all runs.")],
    port: Annotated[int, option("PORT", "Where it listens, on 127.0.0.1.")] = 8040,
) -> None:
    """Show runs in the browser with VisualDL, on this machine only."""
    from paddle_dp.launch import dashboard

    dashboard.start(folder, port)


def ask(entry_point: str, run: Path, options: Mapping[str, Any], overrides: tuple[str, ...]) -> NoReturn:
    """Calls an entry point with a run's recipe and these options, in one process that prints the result; exits."""
    from paddle_dp.recipe import resolved

    start(Job(
        entry_point=entry_point, recipe=resolved(run), overrides=(*overrides, *NO_TRAINING), ranks=1, output_dir=run,
        quiet=True, extra=options,
    ))  # fmt: skip


def merge(
    run: Annotated[Path, argument("RUN", "A run's folder, or a checkpoint's.")],
    out: Annotated[Path, option("FILE", "The file to write.", "--out", "-o")],
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    adapter: Annotated[bool, flag("Write only the adapter of a run that has one.", "--adapter")] = False,
) -> None:
    """Write a checkpoint of any layout as one safetensors file: the plain one-process model.

    An adapter is merged into its base weights, so the file holds the plain model here, too.
    """
    from paddle_dp import checkpoint as checkpoints

    if out.suffix != ".safetensors":
        raise UsageError(
            f"--out {out}: merge writes safetensors, and readers go by the name: give a FILE that ends in "
            ".safetensors. In Python, paddle.save(safetensors.paddle.load_file(FILE), NAME) writes a .pdparams file."
        )
    folder = run / "checkpoints"
    source = checkpoints.find(checkpoint if folder.is_dir() else run, folder)
    is_adapter = checkpoints.is_adapter(source)
    if adapter and not is_adapter:
        raise UsageError(f"--adapter: {source} holds no adapter.")
    if adapter or not is_adapter:
        typer.echo(f"{out}: {checkpoints.merge(source, out, ema=ema)} tensors of {source}")
        return
    folder = source.resolve().parent.parent
    ask("merge", folder, {"to": str(out), "checkpoint": str(source), "ema": ema}, PLAIN)


def generate(
    run: Annotated[Path, argument("RUN", "A language model's run: runs/gpt_single.")],
    prompt: Annotated[str, option("TEXT", "The text to continue.")] = "def ",
    tokens: Annotated[int, option("N", "How many tokens to write.", min=0)] = 200,
    temperature: Annotated[float, option("T", "0: the likeliest token; 1: as learned.", min=0.0)] = 0.8,
    top_k: Annotated[int | None, option("K", "Draw from the K likeliest only.", min=1)] = None,
    seed: Annotated[int, option("N", "Equal seeds draw equally.")] = 0,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
) -> None:
    """Continue a prompt with the language model of a run.

    On a terminal, characters that do not print are shown as escapes such as \\x1b; a file or a pipe gets them
    unchanged.
    """
    options = {
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
        "checkpoint": checkpoint,
        "ema": ema,
    }
    ask("generate", run, options, ("strategy.use=single",))


def predict(
    run: RunFolder,
    files: Annotated[
        list[str], argument("FILES", "Images, texts or arrays (.npy, .npz, .csv, .jsonl); or folders.")
    ],
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    top: Annotated[int, option("K", "How many classes to show.", min=1)] = 3,
    as_csv: Annotated[bool, flag("Print a table with all outputs.", "--csv")] = False,
    out: Annotated[
        Path | None, option("FILE", "Also write all outputs to this .npz file.", "--out", "-o")
    ] = None,
) -> None:
    """Give files to a run's model: classes with probabilities, the loss of a text, or plain outputs.

    Files are read as the run's data set reads held-out samples; arrays have the shape of one sample, or of n. Several
    inputs stand in .npz, .csv or .jsonl under their names (docs/predict.md). The data set itself is not needed.
    """
    options = {
        "files": files,
        "checkpoint": checkpoint,
        "ema": ema,
        "top": top,
        "csv": as_csv,
        "out": None if out is None else str(out if out.suffix else out.with_suffix(".npz")),
    }
    ask("predict", run, options, PLAIN)


def export(
    run: RunFolder,
    out: Annotated[Path | None, option("DIR", "Where to; by default RUN/export.", "--out", "-o")] = None,
    checkpoint: Checkpoint = "newest",
    ema: Averaged = False,
    onnx: Annotated[bool, flag("Also write model.onnx, through paddle2onnx.", "--onnx")] = False,
    hf: Annotated[
        Path | None,
        option("DIR", "Instead write weights for Hugging Face transformers, or torchvision.", "--hf"),
    ] = None,
    adapter: Annotated[
        bool, flag("With --hf: write only the adapter of a run that has one, for PEFT.", "--adapter")
    ] = False,
) -> None:
    """Write a run's model as a program that runs without this package, proven equal to the model."""
    if hf is not None and (onnx or out is not None):
        raise UsageError("--hf DIR writes weights alone: call export again for a program.")
    if adapter and hf is None:
        raise UsageError(
            "--adapter goes with --hf DIR: paddle-dp merge RUN --adapter -o FILE writes it by our names."
        )
    if onnx:
        require("--onnx", "onnx", "paddle2onnx", "onnxruntime")
    options = {
        "to": str(target) if (target := hf or out) else None,
        "checkpoint": checkpoint,
        "ema": ema,
        "onnx": onnx,
        "adapter": adapter,
    }
    ask("export" if hf is None else "export_weights", run, options, PLAIN)
