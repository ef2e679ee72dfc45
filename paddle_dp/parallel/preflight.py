"""What every rank would refuse when it places the recipe's model, found before there are ranks.

The checks are the ranks' own, on a model, an optimizer and a schedule made as ranks make them, but without memory for
the weights: so `paddle-dp check`, a start and a rank say the same. What cannot be made so is left to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.parallel.clip import take_clips
from paddle_dp.parallel.compiled import check_compiles
from paddle_dp.parallel.elementwise import check_elementwise
from paddle_dp.parallel.learning_rate import Rate, check_rate
from paddle_dp.parallel.loss import loss_of
from paddle_dp.parallel.optimizer_checks import (
    check_dense,
    check_not_wrapper,
    check_single_dtype,
    check_ungrouped,
)
from paddle_dp.parallel.recompute import check_recompute
from paddle_dp.parallel.tensor.layers import check_padding
from paddle_dp.part import lazily
from paddle_dp.part.annotation import cut_entries
from paddle_dp.plan.rank_memory import Layout
from paddle_dp.recipe import Recipe

Built = TypeVar("Built")
_LONG = 1_000_000  # updates: how many there will be is known with the data set only


def preflight_check(recipe: Recipe, layout: Layout, splits: bool = False) -> None:
    """Raises UsageError for what no rank of this layout would train. `splits`: a rank may hold a part of the model.

    A script's recipe has no optimizer and no schedule here; they are finished objects, which its ranks look at.
    """
    if recipe.dataset.reading == "scatter" and layout.degrees.servers:
        raise UsageError(
            "dataset.reading=scatter: rank 0 would read for all, and is a server, which reads nothing: set "
            "dataset.reading=each."
        )
    model = built_without_memory(recipe.build_model)
    check_compiles(recipe, layout, model)
    if model is None:
        return
    check_dense(model)
    if recipe.train.precision.dtype != "float64":  # which makes all of it float64
        check_single_dtype(model)
    check_recompute(model, layout.recompute)
    if "optimizer" not in recipe.model_fields_set:
        return
    loss_of(recipe.loss, model, recipe.model.name)
    _check_optimizer(recipe, model, layout, splits)
    if layout.degrees.tensor > 1:
        for parent in model.sublayers(include_self=True):
            for cut in cut_entries(parent):
                check_padding(cut.value, cut.way)


def _check_optimizer(recipe: Recipe, model: nn.Layer, layout: Layout, splits: bool) -> None:
    try:
        schedule = recipe.schedule.build(steps=_LONG, steps_per_epoch=_LONG, batch=recipe.train.batch)
    except Exception:  # noqa: BLE001 - it may not fit that length
        schedule = None
    named = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    optimizer = built_without_memory(lambda: recipe.optimizer.build(schedule() if schedule else 0.1, named))
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
    """What `make` makes, or None where that raises an error that is none of ours: a rank will show it."""
    try:
        with lazily():
            return make()
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - LazyGuard has its limits, and a rank has not
        return None
