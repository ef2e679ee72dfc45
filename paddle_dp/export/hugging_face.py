"""Writes a checkpoint as Hugging Face's libraries read it: config.json and model.safetensors, under their names."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from paddle_dp.checkpoint import TensorShard, load
from paddle_dp.checkpoint.other_names import HUGGING_FACE, PYTORCH, names_of
from paddle_dp.checkpoint.source import SafetensorsFile, WeightsOf
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.checkpoint.translated import Origin, Translated, origins_of
from paddle_dp.errors import CheckpointError, ExportError, UsageError
from paddle_dp.export.export import INFO, check_target, replace
from paddle_dp.part import lazily
from paddle_dp.recipe import Recipe
from paddle_dp.recipe.published import FILE as CONFIG
from paddle_dp.recipe.published import written

WEIGHTS = "model.safetensors"


def write(recipe: Recipe, checkpoint: Path, folder: Path, *, ema: bool = False) -> list[str]:
    """Writes the weights of a checkpoint into `folder`, whole or not at all, and returns a summary. With `ema`, the
    averages in place of the weights that have one.

    A model without a table of Hugging Face's names has PyTorch's, as torchvision's ResNet, and no config.json. Raises
    UsageError for a folder that holds other files, or a model that theirs cannot be; CheckpointError for a damaged
    checkpoint or one that holds NaN; ExportError if what was written is not what was to be.
    """
    check_target(folder)
    saved = load(checkpoint)
    if bad := saved.first_nan():
        raise CheckpointError(
            f"'{bad}' in {saved.folder} holds NaN, so nothing was written: name an earlier one."
        )
    if "base" in saved.state:
        raise UsageError(
            f"--hf: {saved.folder} holds an adapter without the weights that it stands on: paddle-dp merge RUN -o FILE "
            "writes the plain model, under its own names."
        )
    with lazily():
        model = recipe.model.build()
    tables = names_of(model).names
    whose = HUGGING_FACE if HUGGING_FACE in tables else PYTORCH
    config = written(recipe.model.config) if whose == HUGGING_FACE else None
    origins, weights = origins_of(tables[whose]), WeightsOf(saved, ema=ema)
    tensors = _tensors(weights, origins)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        write_tensors(partial / WEIGHTS, tensors, {"format": "pt"})
        _compare(partial / WEIGHTS, weights, origins)
        if config is not None:
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        info = {"model": recipe.model.name, "checkpoint": str(saved.folder), "names": whose}
        (partial / INFO).write_text(json.dumps(info, indent=2) + "\n", "utf-8")
        replace(folder, partial)
    except OSError as error:
        raise ExportError(f"{folder} was not written: {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    kind = f"for {config['architectures'][0]}" if config else f"with {whose} names, and no {CONFIG}"
    return [f"{recipe.model.name} of {saved.folder}: {len(tensors)} tensors, {kind}"]


def _tensors(weights: WeightsOf, origins: dict[str, Origin]) -> dict[str, TensorShard]:
    """The tensors of the other side by their names; a tied weight once."""
    found: dict[str, TensorShard] = {}
    for ours, origin in origins.items():
        for theirs, array in origin.written(weights.read(ours)).items():
            if theirs not in found:
                found[theirs] = TensorShard.whole(theirs, array, weights.dtype(ours))
    return found


def _compare(file: Path, weights: WeightsOf, origins: dict[str, Origin]) -> None:
    """Raises ExportError unless the file, read as weights to begin with, gives the checkpoint's bits."""
    back = Translated(SafetensorsFile(file), origins)
    for name in origins:
        if back.read(name).tobytes() != weights.read(name).tobytes():
            raise ExportError(f"{name} is not what was written for it, so nothing was kept.")
