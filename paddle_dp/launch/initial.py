"""Looks at the weights that a training begins with (recipe: `load`) before anything is moved or started.

Only headers are read: the ranks read every byte, and compare shapes with the model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.launch.command import Job

if TYPE_CHECKING:
    from paddle_dp.recipe import Load, Recipe


def check_load(job: Job, recipe: Recipe) -> None:
    """Raises UsageError for weights that are not there, or would not be any more once the run has its folder."""
    if job.entry_point != "train" or job.resume or recipe.load is None:
        return
    from paddle_dp.recipe.folder import SIGNS

    path = Path(recipe.load.path).expanduser()
    moves = any((recipe.folder / sign).exists() for sign in SIGNS)
    if moves and path.resolve().is_relative_to(recipe.folder.resolve()):
        raise UsageError(
            f"load.path {path} is in the folder of this run, {recipe.folder}, which a new run moves aside. Choose "
            "another folder for this one with --output-dir DIR."
        )
    check_weights(recipe.load)


def check_weights(wanted: Load) -> None:
    """Raises UsageError unless weights can be opened at `wanted.path`, with a tensor for each pattern of `only`."""
    from paddle_dp.checkpoint.source import check_patterns, outline  # imports NumPy, which few jobs need here

    path = Path(wanted.path).expanduser()
    try:
        names = outline(path).names
    except CheckpointError as error:
        raise UsageError(f"load.path: {error}") from None
    except OSError as error:
        raise UsageError(f"load.path: {path} cannot be read: {error.strerror}.") from None
    if not names:
        raise UsageError(f"load.path: there are no weights in {path}.")
    check_patterns(wanted.only, names, f"in {wanted.path}")
