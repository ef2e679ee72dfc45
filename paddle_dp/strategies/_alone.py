"""Checks, placement and gradients for strategies under which ranks do not wait for one another in each update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.units import Recompute

if TYPE_CHECKING:
    from paddle_dp.learner import Learner, Task
    from paddle_dp.learner.update import WeightSync
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe import Recipe


def refuse_shared_decisions(recipe: Recipe, strategy: str) -> None:
    """Raises UsageError for settings that need equal weights, or a common decision, on all ranks after every step."""
    train = recipe.train
    if train.precision.dtype == "float16":
        why = "with float16 all ranks agree on a loss scale at every step: set train.precision=bfloat16 or float32"
    elif train.precision.level == "O2":
        why = (
            "weights of 16 bits lose what a mean changes: set train.precision=bfloat16 (level O1) or float32"
        )
    elif recipe.ema is not None:
        why = (
            "ema averages weights that all ranks have after every step: leave ema out, or take data_parallel"
        )
    elif recipe.guard.recompute is not None:
        why = "guard.recompute compares gradients of equal weights on all ranks: leave it out, or take data_parallel"
    else:
        return
    raise UsageError(f"strategy {strategy}: {why}.")


def compared(recipe: Recipe) -> str:
    """The samples that the recipe's loss compares with one another (`Loss.compares`); "" without a loss."""
    from paddle_dp.core.loss import as_loss

    return "" if recipe.loss is None else as_loss(recipe.loss.build()).compares


def refuse_across(compares: str, ranks: int) -> None:
    """Raises UsageError for a loss that compares the samples of all ranks."""
    if compares == "ranks" and ranks > 1:
        raise UsageError(
            "loss.across=ranks compares the samples of all ranks at every step, and under this strategy each rank "
            "learns alone: set loss.across=rank, or strategy.use=data_parallel."
        )


def place_alone(
    task: Task,
    mesh: Mesh,
    recompute: Recompute,
    weights: Callable[..., WeightSync],
    known_differences: list[str],
) -> Learner:
    """Returns a learner with rank 0's weights, which an exchange over all ranks averages as `weights` says. Collective.
    Raises UsageError for a loss that compares the samples of all ranks."""
    from paddle.distributed.parallel import sync_params_buffers

    from paddle_dp.core.batch_norm import RunningStatistics
    from paddle_dp.core.buffers import give_unusual
    from paddle_dp.exchange.choose import ExchangeSettings, choose_exchange
    from paddle_dp.learner import prepare
    from paddle_dp.learner.learner_checks import NO_REMEDY, BatchNormCheck
    from paddle_dp.model.recompute import recomputed

    refuse_across(task.loss.compares, mesh.ranks)
    recomputed(task.model, recompute)
    prepared = prepare(task, mesh)
    if mesh.ranks > 1:
        give_unusual(prepared.model, mesh)
        sync_params_buffers(prepared.model, fuse_params=False)
    placed, statistics = prepared.placed(), RunningStatistics(prepared.model, mesh)
    return prepared.learner(
        placed,
        exchange=choose_exchange(ExchangeSettings(absent=True), placed),
        weights=partial(
            weights, placed=placed, rate=prepared.rate, statistics=statistics, zero_dtype=prepared.zero_dtype
        ),
        statistics=statistics,
        batch_norm_check=partial(BatchNormCheck, mesh, remedy=NO_REMEDY),
        known_differences=known_differences,
    )
