"""Checks a training's initial weights (recipe: `load`) before anything is moved or started.

It reads only headers, and builds the model without memory, to compare names and shapes: the ranks read every byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.launch.command import Job
from paddle_dp.part import lazily

if TYPE_CHECKING:
    from paddle_dp.part import Part
    from paddle_dp.recipe import Load, Recipe


def check_load(job: Job, recipe: Recipe) -> None:
    """Raises UsageError for weights that do not exist, or that the new run would move away with its folder."""
    if job.entry_point != "train" or job.resume or recipe.load is None:
        return
    from paddle_dp.recipe.folder import has_run

    path = Path(recipe.load.path).expanduser()
    if has_run(recipe.folder) and path.resolve().is_relative_to(recipe.folder.resolve()):
        raise UsageError(
            f"load.path {path} is in the folder of this run, {recipe.folder}, which a new run moves aside. Choose "
            "another folder for this one with --output-dir DIR."
        )
    check_weights(recipe.load, recipe.model)


def check_weights(load: Load, model_config: Part) -> list[str]:
    """Returns the table of weights to load; [] for a model that cannot be built without memory: the ranks compare it.

    Raises UsageError unless weights can be opened at `load.path` and the requested ones fit the model.
    """
    from paddle_dp.checkpoint.matching import outlook  # imports paddle, as most models do
    from paddle_dp.checkpoint.source import outline

    path = Path(load.path).expanduser()
    try:
        weights = outline(path)
    except CheckpointError as error:
        raise UsageError(f"load.path: {error}") from None
    except OSError as error:
        raise UsageError(f"load.path: {path} cannot be read: {error.strerror}.") from None
    if not weights.names:
        raise UsageError(f"load.path: there are no weights in {path}.")
    try:
        with lazily():
            model = model_config.build()
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - not every model can be built without memory
        return []
    return outlook(weights, model, load)
