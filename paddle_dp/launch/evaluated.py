"""An evaluation on ranks that the run's strategy does not take: with the whole model on each of them instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job, Plan

if TYPE_CHECKING:
    from paddle_dp.recipe import Recipe

WHOLE = "strategy.use=data_parallel"  # takes any number of ranks; on one it is the plain model

Read = Callable[[Job], "tuple[Recipe, Plan]"]
"""Reads a job's recipe and plans its ranks. Raises UsageError where its strategy does not take them."""


def on_any_ranks(job: Job, read: Read, say: Callable[[str], None]) -> tuple[Recipe, Plan]:
    """What `read` gives of the job of an evaluation; where that is refused, of the job with `WHOLE`.

    A checkpoint of any strategy fits any other, so two servers and their workers, or four stages, are not needed to
    evaluate what they have learned. Raises what `read` raises where `WHOLE` is refused, too, and where the job itself
    sets something of the strategy, which is then what was asked for.
    """
    try:
        return read(job)
    except UsageError as refused:
        asked = any(word.partition("=")[0].partition(".")[0].strip() == "strategy" for word in job.overrides)
        if asked or type(refused) is not UsageError:  # a mistake in the recipe, a package that is missing
            raise
    recipe, plan = read(replace(job, overrides=(*job.overrides, WHOLE)))
    ranks = f"{plan.ranks} ranks" if plan.ranks > 1 else "1 process"
    say(
        f"evaluated on {ranks} with {WHOLE}: what the run was trained with needs other ranks, its checkpoints do not"
    )
    return recipe, plan
