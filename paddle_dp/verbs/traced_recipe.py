"""A recipe's model as operators, for a plan of a model whose settings do not say what it computes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle_dp.assembly.inputs import Inputs
from paddle_dp.data.prepared import prepared
from paddle_dp.data.stream import as_dataset
from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.model.traced import UncountedError, traced_model
from paddle_dp.part import lazily
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.recipe import Recipe

Shapes = list[tuple[tuple[int, ...], str]]


def training_data(recipe: Recipe) -> Any:
    """The data set as a loader gets it, built for its first sample."""
    return prepared(as_dataset(recipe.dataset.build("train"), 1, "dataset"), recipe.loader)


def traced_recipe(recipe: Recipe, dataset: Any = None) -> TracedModel:
    """The recipe's model, traced with the shapes of a sample of the `dataset`: by default the recipe's `training_data`,
    built if need be. Raises UsageError with the reason if it cannot be."""
    inputs = sample_shapes(recipe, dataset)
    try:
        with _quiet_stderr():
            return traced_model(recipe.model.build, inputs)
    except UncountedError as error:
        raise not_planned(recipe, str(error)) from error


def sample_shapes(recipe: Recipe, dataset: Any = None) -> Shapes:
    """Shape and dtype of each input of a sample, in the order of the model's parameters: as the data set's settings say
    (`input_shape`), or of the first sample. Raises UsageError if neither is there."""
    shape = getattr(recipe.dataset.config, "input_shape", None)
    if shape is not None:
        return [(tuple(shape), "float32")]
    try:
        inputs = Inputs.from_dataset(training_data(recipe) if dataset is None else dataset)
    except Exception as error:  # a data set is a user's code
        kind = "" if isinstance(error, (PaddleDPError, OSError)) else f"{type(error).__name__}: "
        raise not_planned(
            recipe, f"the first sample, whose shape it needs, cannot be read: {kind}{str(error).rstrip('.')}"
        ) from error
    arrays = [(tuple(dim or 1 for dim in array.shape), array.dtype) for array in inputs.arrays]
    if isinstance(inputs.structure, dict):
        by_name = dict(zip(sorted(inputs.structure), arrays, strict=False))
        with weightless(recipe):
            names = [*inspect.signature(recipe.model.build().forward).parameters]
        arrays = [by_name[name] for name in names if name in by_name]
    nested = inputs.structure.values() if isinstance(inputs.structure, dict) else inputs.structure or ()
    if any(each is not None for each in nested):
        raise not_planned(recipe, "its inputs are nested")
    return arrays


def not_planned(recipe: Recipe, reason: str) -> UsageError:
    """The error for a model without a plan, with the reason as the end of a sentence."""
    return UsageError(
        f"model {recipe.model.name} cannot be planned: {reason}. `paddle-dp check --ranks N` counts its bytes; "
        "`paddle-dp train --why` measures its step."
    )


@contextmanager
def weightless(recipe: Recipe) -> Iterator[None]:
    """A context in which the recipe's model is built without memory for weights. Raises UsageError if it cannot be."""
    try:
        with lazily():
            yield
    except PaddleDPError:
        raise
    except Exception as error:  # in Paddle's code or in a user's
        raise UsageError(
            f"model {recipe.model.name} cannot be built without memory for its weights, as weight_norm and an LSTM of "
            f"Paddle 3.3.1 cannot: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        ) from error


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """A context in which nothing is written to stderr: Paddle 3.3.1 warns of a BatchNorm in a program, from C++."""
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
