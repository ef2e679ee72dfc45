"""Runs the checks that every rank makes when it places the recipe's model, before there are ranks.

The model, optimizer and schedule are built as on a rank, but without memory for the weights, so `paddle-dp check`, a
start and a rank report the same errors. Parts that cannot be built so are left to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paddle import nn

from paddle_dp.axes.tensor.layers import check_cuttable
from paddle_dp.core.optimizer import (
    Rate,
    check_dense,
    check_elementwise,
    check_not_wrapper,
    check_rate,
    check_single_dtype,
    check_ungrouped,
    take_clips,
)
from paddle_dp.core.turns import loss_of_recipe, make_optimizer_of
from paddle_dp.errors import UsageError
from paddle_dp.model.compiled import check_compiles, check_programs
from paddle_dp.model.recompute import check_recompute
from paddle_dp.part import lazily
from paddle_dp.part.annotation import cut_entries
from paddle_dp.plan.layout import Layout
from paddle_dp.recipe import Recipe

Built = TypeVar("Built")
_LONG = 1_000_000  # updates: their number is known with the data set only


def preflight_check(recipe: Recipe, layout: Layout, model: nn.Layer | None, splits: bool = False) -> None:
    """Raises UsageError for a recipe that no rank of this layout would train. `model`: the recipe's, without memory for
    its weights (`built_without_memory`). `splits`: a rank may hold a part of the model.

    A script's recipe has no optimizer and no schedule here; they are finished objects, which its ranks check.
    """
    check_compiles(recipe, layout, model)
    if model is None:
        return
    check_programs(model, layout, recipe.strategy.config.sync_batch_norm)
    check_dense(model)
    if recipe.train.precision.dtype != "float64":  # float64 casts all parameters
        check_single_dtype(model)
    check_recompute(model, layout.recompute)
    if "optimizer" not in recipe.model_fields_set:
        return
    loss_of_recipe(recipe, model)
    _check_optimizer(recipe, model, layout, splits)
    if layout.degrees.tensor > 1:
        for parent in model.sublayers(include_self=True):
            for cut in cut_entries(parent):
                check_cuttable(cut.value, cut.way)


def _check_optimizer(recipe: Recipe, model: nn.Layer, layout: Layout, splits: bool) -> None:
    try:
        schedule = recipe.schedule.build(steps=_LONG, steps_per_epoch=_LONG, batch=recipe.train.batch)
    except Exception:  # noqa: BLE001 - it may not fit that length
        schedule = None
    named = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    optimizer = built_without_memory(
        lambda: make_optimizer_of(recipe)(schedule() if schedule else 0.1, named)
    )
    if optimizer is None:
        return
    check_not_wrapper(optimizer)
    check_rate(optimizer, schedule)
    Rate(optimizer, schedule)
    if splits:
        check_elementwise(optimizer, layout.degrees.tensor)
        take_clips(optimizer)
        if layout.degrees.sharding > 1:
            check_ungrouped(optimizer, "strategy.sharding")


def built_without_memory(make: Callable[[], Built]) -> Built | None:
    """The result of `make`, or None if it raises another error than UsageError: a rank will report it."""
    try:
        with lazily():
            return make()
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - a limit of LazyGuard, which a rank does not have
        return None
