"""The assignment of a model's branches for `check`: only a forward of some samples shows it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.data.prepared import prepared
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import read_samples
from paddle_dp.data.stream import as_dataset
from paddle_dp.parallel.branches.planned import keep_share, planned
from paddle_dp.parallel.parameter_groups import group
from paddle_dp.part import adapted
from paddle_dp.plan.rank_memory import Blocks, Layout
from paddle_dp.recipe import Recipe
from paddle_dp.structure import mapped


def assign_branches(recipe: Recipe, layout: Layout, blocks: Blocks, width: int) -> tuple[Layout, Blocks]:
    """The layout and the weights with each rank's branches and their traffic, at `width` bytes per number.

    Builds the whole model, and runs it on the first two samples, as every rank does when it begins. Raises DataError
    if these cannot be read, UsageError for a table that does not match the model.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Paddle's frozen BatchNorms, in a trial
        plan = planned(_model(recipe), first_inputs(recipe), layout.degrees.tensor)
    samples = -(-recipe.train.batch // layout.degrees.dp_size)
    return replace(layout, branches=plan.step(samples, width)), plan.annotated(blocks)


def rank_model(recipe: Recipe, layout: Layout, tensor_rank: int) -> nn.Layer:
    """The model with the branches of one rank of the tensor axis."""
    model = _model(recipe)
    keep_share(model, first_inputs(recipe), layout.degrees.tensor, tensor_rank)
    return model


def first_inputs(recipe: Recipe) -> Any:
    """The inputs of the first two samples, as a model gets them."""
    with restoring_globals():
        data = prepared(as_dataset(recipe.dataset.build("train"), 2, "dataset"), recipe.loader)
        inputs, _ = read_samples(data, np.arange(min(2, len(data))), recipe.train.seed, 0)
    return mapped(paddle.to_tensor, inputs)


def _model(recipe: Recipe) -> nn.Layer:
    """The model with its initial weights, on the CPU."""
    paddle.set_device("cpu")
    paddle.seed(recipe.train.seed)
    model, before = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
    group(model, recipe.optimizer.groups, before)
    return model
