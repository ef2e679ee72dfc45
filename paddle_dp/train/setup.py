"""What a training is assembled from, whoever described it: a recipe, a script, a proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddle_dp.parallel import Task
from paddle_dp.part import Part
from paddle_dp.recipe import LoaderSettings, Recipe
from paddle_dp.train.callback import Callback
from paddle_dp.train.run import Run
from paddle_dp.units import Length

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parts of a training, and how they are made when it is known how long it is.

    `dataset` gives the data set of a split, or None where there is none; `task`, what is learned in so many steps with
    so many an epoch; `callbacks`, those of a run. `length` is None where only `fit` will know. `batch` is global.
    `asked` is the recipe that strategy and callbacks may refuse; `recipe` is None where nobody wrote one. `words`: the
    parts that a script named in a recipe's words, with their settings.
    """

    name: str
    folder: Path
    strategy: Part
    asked: Recipe
    dataset: Callable[[Split], Any]
    task: Callable[[int, int], Task]
    batch: int
    micro_batches: int = 1
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    length: Length | None = None
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    callbacks: Callable[[Run], Sequence[Callback]] = lambda run: ()
    recipe: Recipe | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
