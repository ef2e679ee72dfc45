"""Predicts, without ranks, the rank of each branch of a model and the exchanged bytes.

Only a forward of some samples shows the branches of a model, so the whole model is built and runs on the first two
samples, as every rank does when it begins.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.batch import mapped
from paddle_dp.core.data_group import PaddleGroup
from paddle_dp.core.parameter_groups import group
from paddle_dp.core.placement import Placements
from paddle_dp.core.precision import cast, read_by
from paddle_dp.data.prepared import prepared
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import read_samples
from paddle_dp.data.stream import as_dataset
from paddle_dp.part import adapted
from paddle_dp.recipe import Recipe
from paddle_dp.strategies.branches.branch_trace import BranchTrace, observed
from paddle_dp.strategies.branches.branched_model import drop_remote, ranks_of_layers, spread_over


def rank_model(recipe: Recipe, ranks: int, rank: int) -> nn.Layer:
    """Builds the model with the branches of one of the `ranks` among which they are split."""
    model = _model(recipe)
    traces = _traced(model, recipe, ranks)
    drop_remote(model, traces, PaddleGroup(range(ranks), rank, None), Placements())
    return model


def _traced(model: nn.Layer, recipe: Recipe, ranks: int) -> list[BranchTrace]:
    """Tries the tables of branches with the first samples, and gives each branch a rank."""
    traces, _ = observed(model, cast(first_inputs(recipe), read_by(model)))
    spread_over(traces, ranks)
    return traces


def first_inputs(recipe: Recipe) -> Any:
    """Returns the inputs of the first two samples, as a model gets them."""
    with restoring_globals():
        data = prepared(as_dataset(recipe.dataset.build("train"), 2, "dataset"), recipe.loader)
        inputs, _ = read_samples(data, np.arange(min(2, len(data))), recipe.train.seed, 0)
    return mapped(paddle.to_tensor, inputs)


def _model(recipe: Recipe) -> nn.Layer:
    """Builds the model with its initial weights, on the CPU."""
    paddle.set_device("cpu")
    paddle.seed(recipe.train.seed)
    model, before = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
    group(model, recipe.optimizer.groups, before)
    recipe.optimizer.prepare(model)
    return model


@dataclass(frozen=True)
class Planned:
    """`at`: the ranks of the group that keep a branch's weight, by name. Elements per sample: `outputs` of each rank's
    branches, and `inputs` of their layers that have a gradient."""

    at: dict[str, tuple[int, ...]]
    outputs: list[float]
    inputs: float


def planned_branches(recipe: Recipe, ranks: int) -> Planned:
    """Plans a recipe's branches. Raises DataError if the samples cannot be read, UsageError for a table that does not
    match the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Paddle's frozen BatchNorms, in a trial
        model = _model(recipe)
        traces = _traced(model, recipe, ranks)
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    at = {
        names[id(parameter)]: tuple(sorted(layer_ranks))
        for layer, layer_ranks in ranks_of_layers(traces, ranks)
        for parameter in layer.parameters()
    }
    outputs = [0.0] * ranks
    for trace in traces:
        for size, owner in zip(trace.sizes, trace.owners, strict=True):
            outputs[owner] += size
    return Planned(at, outputs, sum(trace.learned for trace in traces))
