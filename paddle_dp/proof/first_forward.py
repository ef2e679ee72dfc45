"""Runs the first batch on one process before a proof starts its ranks, which would all fail later."""

from __future__ import annotations

from typing import Any

from paddle_dp.assembly.first_forward import user_frame
from paddle_dp.checks.repeats import compute_without_exchange
from paddle_dp.errors import JobError, PaddleDPError, gist
from paddle_dp.proof.trace import RecordedSide
from paddle_dp.recipe import Recipe


def first_forward(recipe: Recipe, options: dict[str, Any]) -> None:
    """Builds the recipe's parts, and computes loss and gradients of its first batch; options as for `trace`.

    Raises JobError, exit status 4, for an exception of the user's code, in one sentence with the place in that code.
    """
    doing = "The data set, the model or the optimizer of this recipe cannot be made"
    try:
        side = RecordedSide(recipe.model_copy(update={"callbacks": []}), options)
        learner = side.learner()
        doing = "The model or the loss of this recipe fails on its first batch"
        compute_without_exchange(learner, learner.mixed.cast_batch(next(side.batches(wide=False))))
    except PaddleDPError:
        raise
    except Exception as error:  # noqa: BLE001 - the code is the user's
        frame = user_frame(error)
        failed = JobError(f"{doing}. {type(error).__name__}: {gist(error)}{frame and f' ({frame})'}")
        failed.exit_status = 4
        raise failed from None
