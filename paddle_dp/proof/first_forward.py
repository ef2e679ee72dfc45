"""The first batch on one process, before a proof starts its sides: what fails there would fail in every rank, late."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import paddle

import paddle_dp
from paddle_dp.errors import JobError, PaddleDPError, gist
from paddle_dp.proof.trace import Side
from paddle_dp.recipe import Recipe

NOT_OF_THE_USER = tuple(f"{Path(str(package.__file__)).parent}/" for package in (paddle_dp, paddle))


def first_forward(recipe: Recipe, options: dict[str, Any]) -> None:
    """Builds the recipe's parts, and computes the loss of its first batch and the gradients; options as for `trace`.

    Raises JobError, exit status 4, for an exception of the user's code, in one sentence with the place in that code.
    """
    doing = "The data set, the model or the optimizer of this recipe cannot be made"
    try:
        side = Side(recipe.model_copy(update={"callbacks": []}), options)
        learner = side.learner()
        doing = "The model or the loss of this recipe fails on its first batch"
        learner.compute_alone(learner.mixed.cast_batch(next(side.batches(wide=False))))
    except PaddleDPError:
        raise
    except Exception as error:  # noqa: BLE001 - the code is the user's
        failed = JobError(f"{doing}. {type(error).__name__}: {gist(error)}{_place(error)}")
        failed.exit_status = 4
        raise failed from None


def _place(error: Exception) -> str:
    """Where the innermost code that is neither Paddle's nor this package's was, as the end of a sentence."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_OF_THE_USER)
    ]
    frames = [f for f in frames if Path(f.filename).is_file()]  # not of code that Python holds itself
    if not frames:
        return ""
    last = frames[-1]
    return f"\n  {last.filename}:{last.lineno}, in {last.name}\n    {last.line}"
