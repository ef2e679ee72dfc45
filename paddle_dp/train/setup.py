"""The description of a training for `TrainerBuilder`, made from a recipe, a script or a proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddle_dp.parallel import Task
from paddle_dp.part import Part
from paddle_dp.recipe import Ema, Guard, Load, LoaderSettings, Recipe
from paddle_dp.train.callback import Callback
from paddle_dp.train.run import Run
from paddle_dp.units import Length

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The settings of a training, and functions that make its parts.

    `dataset(split)` gives a data set or None, `task(steps, steps_per_epoch)` the task, `callbacks(run)` the callbacks
    of the run. `length` is None if only `fit` gets it. `batch` is global.
    `requested` is the recipe that strategy and callbacks check and may refuse; `recipe` is the same, or None for a
    script, whose `requested` is made up. `named_settings`: the settings of the parts that a script gave by name.
    `script_callbacks`: the callbacks that it made. `delivered` is called with the split and the samples that this rank
    gets from rank 0, if that reads for all.
    """

    name: str
    folder: Path
    strategy: Part
    requested: Recipe
    dataset: Callable[[Split], Any]
    task: Callable[[int, int], Task]
    batch: int
    micro_batches: int = 1
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    length: Length | None = None
    max_time: float | None = None
    guard: Guard = field(default_factory=Guard)
    load: Load | None = None
    ema: Ema | None = None
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    callbacks: Callable[[Run], Sequence[Callback]] = lambda run: ()
    recipe: Recipe | None = None
    named_settings: Mapping[str, Any] = field(default_factory=dict)
    script_callbacks: Sequence[Callback] = ()
    delivered: Callable[[Split, Any], None] | None = None

    @property
    def scatters(self) -> bool:
        """Whether rank 0 reads the data for all ranks."""
        return self.requested.dataset.reading == "scatter"
