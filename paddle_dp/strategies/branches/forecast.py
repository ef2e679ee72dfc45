"""Predicts, without ranks, the rank of each branch of a model and the exchanged bytes.

Only a forward of some samples shows the branches of a model, so the whole model is built and runs on the first two
samples, as every rank does when it begins.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
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
from paddle_dp.plan.rank_memory import Blocks, BranchTraffic, Layout
from paddle_dp.recipe import Recipe
from paddle_dp.strategies.branches.branch_trace import observed
from paddle_dp.strategies.branches.branched_model import drop_remote, ranks_of_layers, spread_over


def assign_branches(recipe: Recipe, layout: Layout, blocks: Blocks, width: int) -> tuple[Layout, Blocks]:
    """Returns the layout and the weights with each rank's branches and their traffic, at `width` bytes per number.

    Raises DataError if the samples cannot be read, UsageError for a table that does not match the model.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Paddle's frozen BatchNorms, in a trial
        plan = planned(_model(recipe), first_inputs(recipe), layout.degrees.tensor)
    samples = -(-recipe.train.batch // layout.degrees.dp_size)
    return replace(layout, branches=plan.step(samples, width)), plan.annotated(blocks)


def rank_model(recipe: Recipe, ranks: int, rank: int) -> nn.Layer:
    """Builds the model with the branches of one of the `ranks` among which they are split."""
    model = _model(recipe)
    keep_share(model, first_inputs(recipe), ranks, rank)
    return model


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
    """`at`: the ranks of the group that keep a branch's weight, by name; `branches`: exchanged elements per sample."""

    at: dict[str, tuple[int, ...]]
    branches: BranchTraffic

    def annotated(self, blocks: Blocks) -> Blocks:
        """The weights of the model, with the ranks of branches' weights."""
        return [[replace(weight, at=self.at.get(weight.name, ())) for weight in block] for block in blocks]

    def step(self, samples: int, width: int) -> BranchTraffic:
        """The bytes that a step of `samples` samples exchanges, with `width` bytes per element."""
        per_sample, size = self.branches, samples * width
        return BranchTraffic(
            outputs=tuple(numbers * size for numbers in per_sample.outputs), inputs=per_sample.inputs * size
        )


def planned(model: nn.Layer, inputs: Any, ranks: int) -> Planned:
    """Plans from a forward of these inputs. Raises UsageError for a table that does not match the model."""
    traces, _ = observed(model, cast(inputs, read_by(model)))
    spread_over(traces, ranks)
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
    return Planned(at, BranchTraffic(outputs=tuple(outputs), inputs=sum(trace.learned for trace in traces)))


def keep_share(model: nn.Layer, inputs: Any, ranks: int, rank: int) -> None:
    """Reduces a model to the layers that one rank of the group has."""
    traces, _ = observed(model, cast(inputs, read_by(model)))
    spread_over(traces, ranks)
    drop_remote(model, traces, PaddleGroup(range(ranks), rank, None), Placements())
