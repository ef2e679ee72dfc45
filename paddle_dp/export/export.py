"""Exports a run's model and verifies that the exported outputs are the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_dp.assembly.build import example_dataset, learner_of, load_trained
from paddle_dp.batch import mapped
from paddle_dp.checkpoint import Checkpoint
from paddle_dp.core.lora import merge_low_rank
from paddle_dp.core.precision import narrowed
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import class_names, read_samples
from paddle_dp.errors import ExportError, NotFiniteError
from paddle_dp.export import onnx, program
from paddle_dp.export.program import Parity
from paddle_dp.export.target import INFO, check_target, new_export
from paddle_dp.mesh import join
from paddle_dp.recipe import Recipe

SAMPLES = 8
# Relative to the largest output. The program runs Paddle's kernels and is usually bit-identical; ONNX runs others.
TOLERANCE, ONNX_TOLERANCE = 1e-5, 1e-4


def export(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes the run's checkpoint as a program into the folder options["to"]: complete and verified, or nothing.

    Raises ExportError if the model cannot be written, or if outputs on held-out samples, or else on the training's,
    differ from the model's; UsageError if the folder holds other files.
    """
    folder = Path(options.get("to") or recipe.folder / "export")
    check_target(folder)
    with new_export(folder) as partial:
        summary = _write(partial, recipe, options)
    print(f"{folder}\n" + "\n".join(f"  {line}" for line in summary), flush=True)


def _write(folder: Path, recipe: Recipe, options: dict[str, Any]) -> list[str]:
    """Writes all files, verifies them, and returns a summary for the screen."""
    data = example_dataset(recipe)
    model, checkpoint = _trained(recipe, options)
    inputs = program.batches(_samples(data, model), lambda batch: program.outputs(model, batch))
    expected = [program.outputs(model, batch) for batch in inputs]
    program.check_finite(expected)
    merge_low_rank(model)  # the program holds the merged model; `expected` is from the model with its adapter
    read = program.write(model, inputs, folder)
    parity = {"program": program.compare(program.load(folder), inputs, expected, TOLERANCE)}
    if options.get("onnx"):
        onnx.write(model, inputs, folder)
        parity["onnx"] = program.compare(onnx.load(folder), inputs, expected, ONNX_TOLERANCE)
    _check_parity(parity)
    shapes = [vars(program_input) for program_input in read]
    info = {
        "model": recipe.model.name, "checkpoint": str(checkpoint.folder),
        **({"input": shapes[0]} if len(shapes) == 1 else {"inputs": shapes}), "classes": list(class_names(data)),
        "parity": {name: vars(result) for name, result in parity.items()}, "paddle": paddle.__version__,
    }  # fmt: skip
    (folder / INFO).write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    lines = [f"{recipe.model.name} of {checkpoint.folder}, {size:.1f} MiB"]
    lines += [f"input {program_input}" for program_input in read]
    return lines + [f"{name}: {result}" for name, result in parity.items()]


def _trained(recipe: Recipe, options: dict[str, Any]) -> tuple[paddle.nn.Layer, Checkpoint]:
    """Returns the model with a checkpoint's weights, or with their averages, in evaluation mode."""
    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    learner = learner_of(recipe, mesh)
    checkpoint = load_trained(recipe, options, learner)
    try:
        learner.check(f"{checkpoint.folder} cannot be exported")
    except NotFiniteError as error:
        raise ExportError(
            f"{error} Nothing was written: name an earlier checkpoint with --checkpoint."
        ) from None
    learner.model.eval()
    return learner.model, checkpoint


def _samples(data: Any, model: paddle.nn.Layer) -> program.Inputs:
    """Reads the first inputs: float64 arrays become float32, unless the model has float64 weights."""
    with restoring_globals():
        inputs, _ = read_samples(data, np.arange(min(SAMPLES, len(data))), 0, 0)
    return mapped(lambda array: narrowed(array, model), inputs)


def _check_parity(parity: dict[str, Parity]) -> None:
    for name, result in parity.items():
        if not result.holds:
            raise ExportError(
                f"the {name} does not give the model's outputs, so nothing was written: {result}."
            )
