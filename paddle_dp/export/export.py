"""A run's model as files that need none of our code: a Paddle program, on request ONNX, held against the model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddle_dp.checkpoint import Checkpoint
from paddle_dp.data.sample import class_names, read_sample
from paddle_dp.errors import ExportError, NotFiniteError, UsageError
from paddle_dp.export import onnx, program
from paddle_dp.export.program import Parity
from paddle_dp.mesh import join
from paddle_dp.recipe import Recipe
from paddle_dp.train.assemble import find_checkpoint
from paddle_dp.train.build import learner_of
from paddle_dp.train.state import load_model

SIGN = "export.json"
SAMPLES = 8
# Of the largest output. The program runs Paddle's own kernels and usually agrees to the bit; ONNX has others.
TOLERANCE, ONNX_TOLERANCE = 1e-5, 1e-4


def export(recipe: Recipe, options: dict[str, Any]) -> None:
    """Writes the run's checkpoint as a program into options["to"]: the folder is there whole, and right, or not at all.

    Raises ExportError when the model cannot be written, or when the program's outputs on held-out samples are not the
    model's; UsageError when the folder holds something else.
    """
    folder = Path(options.get("to") or recipe.folder / "export")
    refuse(folder)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        said = _fill(partial, recipe, options)
        program.place(partial, folder, SIGN)
    except OSError as error:
        raise ExportError(f"{folder} was not written: {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"{folder}\n" + "\n".join(f"  {line}" for line in said), flush=True)


def refuse(folder: Path) -> None:
    """Raises UsageError for a folder in which something else than an older export lies."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / SIGN).exists())):
        raise UsageError(f"{folder} holds something else already: name another folder with -o DIR.")


def _fill(folder: Path, recipe: Recipe, options: dict[str, Any]) -> list[str]:
    """Writes everything and proves it; returns what a person wants to read about it."""
    dataset = recipe.dataset.build("test")
    model, found = _trained(recipe, options.get("checkpoint") or "newest")
    inputs = program.batches(_samples(dataset, model), lambda batch: program.outputs(model, batch))
    wanted = [program.outputs(model, batch) for batch in inputs]
    program.insist_on_numbers(wanted)
    shape = program.write(model, inputs, folder)
    parity = {"program": program.compare(program.load(folder), inputs, wanted, TOLERANCE)}
    if options.get("onnx"):
        onnx.write(model, inputs, folder)
        parity["onnx"] = program.compare(onnx.load(folder), inputs, wanted, ONNX_TOLERANCE)
    _insist(parity)
    about = {
        "model": recipe.model.name,
        "checkpoint": str(found.folder),
        "input": {"name": program.INPUT, "dtype": str(inputs[0].dtype), "shape": shape},
        "classes": list(class_names(dataset)),
        "parity": {name: vars(held) for name, held in parity.items()},
        "paddle": paddle.__version__,
    }
    (folder / SIGN).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    free = ", ".join("any" if dim is None else str(dim) for dim in shape)
    lines = [f"{recipe.model.name} of {found.folder}, {size:.1f} MiB"]
    lines += [f"input {program.INPUT}: {inputs[0].dtype} [{free}]"]
    return lines + [f"{name}: {held}" for name, held in parity.items()]


def _trained(recipe: Recipe, which: str) -> tuple[paddle.nn.Layer, Checkpoint]:
    """The plain model with a checkpoint's weights, as it is evaluated: no dropout, running statistics used."""
    mesh = join(seed=recipe.train.seed, device=recipe.train.device)
    learner = learner_of(recipe, mesh)
    found = find_checkpoint(recipe.folder, which, mesh)
    load_model(found, learner)
    try:
        learner.check(f"{found.folder} cannot be exported")
    except NotFiniteError as error:
        raise ExportError(
            f"{error} Nothing was written: name an earlier checkpoint with --checkpoint."
        ) from None
    learner.model.eval()
    return learner.model, found


def _samples(dataset: Any, model: paddle.nn.Layer) -> np.ndarray[Any, Any]:
    """Some inputs as the model reads them: NumPy's float64 is float32 to a float32 model."""
    inputs = np.stack([read_sample(dataset, index)[0] for index in range(min(SAMPLES, len(dataset)))])
    wide = any(parameter.dtype == paddle.float64 for parameter in model.parameters())
    return inputs.astype("float32") if inputs.dtype == np.float64 and not wide else inputs


def _insist(parity: dict[str, Parity]) -> None:
    for name, found in parity.items():
        if not found.holds:
            raise ExportError(
                f"the {name} does not give the model's outputs, so nothing was written: {found}."
            )
