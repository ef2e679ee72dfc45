"""The description of a training for `TrainerBuilder`, made from a recipe, a script or a proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddle_dp.identity.facts import TrainingSettings
from paddle_dp.learner import Task
from paddle_dp.recipe import Load, LoaderSettings
from paddle_dp.train.callback import Callback
from paddle_dp.train.run import Run

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(TrainingSettings):
    """The settings of a training, and functions that make its parts.

    `dataset(split)` gives a data set or None, `task(steps, steps_per_epoch)` the task, `callbacks(run)` the callbacks
    of the run. `delivered` is called with the split and the samples that this rank gets from rank 0, if that reads for
    all.
    """

    name: str
    folder: Path
    dataset: Callable[[Split], Any]
    task: Callable[[int, int], Task]
    max_time: float | None = None
    load: Load | None = None
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    callbacks: Callable[[Run], Sequence[Callback]] = lambda run: ()
    delivered: Callable[[Split, Any], None] | None = None
