"""Curves, recipe, settings and pictures for VisualDL, in <run>/visualdl: see them with `paddle-dp dashboard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.callbacks._confusion import draw
from paddle_dp.callbacks._pictures import picture, png
from paddle_dp.callbacks._silent import Silent
from paddle_dp.callbacks._visualdl import Log
from paddle_dp.data.randomness import globals_kept, seed_sample
from paddle_dp.train import Callback, Moment, Run
from paddle_dp.units import Count, Every

# The curve of each number of a step; other numbers (a loss's own scores) are train/<name>.
CURVES = {
    "samples_per_second": "speed/samples_per_second",
    "waiting": "speed/waiting_for_data",
    "memory": "speed/memory_megabytes",
}
_QUIET = ("seconds_per_step",)  # one over samples_per_second


@dataclass(frozen=True, kw_only=True)
class Config:
    """`images`: how many samples to show; `histograms`: of all weights, each epoch; `confusion`: of the last
    evaluation of a classifier."""

    every: Every = Every.parse("10 steps")
    images: Count = 0
    histograms: bool = False
    confusion: bool = True

    def build(self, run: Run) -> Callback:
        return Dashboard(run, self) if run.mesh.is_first else Silent(self.every)


class Dashboard(Callback):
    """Writes one VisualDL log that reads as if the run had never been interrupted."""

    def __init__(self, run: Run, config: Config):
        self.run, self.config, self.every = run, config, config.every
        self.log: Log | None = None
        self._listed = False
        self._latest: Moment | None = None

    def start(self, moment: Moment) -> None:
        self.log = Log(self.run.folder / "visualdl", moment.progress.step, self.run.name)
        self._listed = False
        recipe = self.run.folder / "recipe.yaml"
        if self.run.recipe is not None and recipe.exists():
            # The page shows text as one paragraph: a mark tells the sections apart.
            lines = [line for line in recipe.read_text().splitlines() if not line.startswith("#")]
            marked = [line if line.startswith((" ", "-")) else f"■ {line}" for line in lines]
            self.log.text("recipe", "\n".join(marked), moment.progress.step)
        for index in range(min(self.config.images, len(self.run.train_loader.dataset))):
            self._show(index, moment.progress.step)

    def step(self, moment: Moment) -> None:
        if self.log:
            numbers = {n: v for n, v in moment.numbers.items() if n not in _QUIET}
            if "memory" in numbers:
                numbers["memory"] /= 2**20
            self.log.scalars(
                {CURVES.get(n, f"train/{n}"): v for n, v in numbers.items()}, moment.progress.step
            )

    def epoch(self, moment: Moment) -> None:
        if self.log and self.config.histograms:
            for name, tensor in moment.trainer.learner.named_parameters():
                counts, edges = np.histogram(tensor.astype("float32").numpy(), bins=50)
                self.log.histogram(f"weights/{name}", counts.tolist(), edges.tolist(), moment.progress.step)

    def evaluated(self, moment: Moment) -> None:
        if self.log is None:
            return
        tags = {f"evaluation/{name}": value for name, value in moment.detail.numbers.items()}
        self.log.scalars(tags, moment.progress.step)
        self._latest = moment
        self._list(list(tags))

    def end(self, moment: Moment) -> None:
        self._list(["train/loss"])
        latest = self._latest
        if self.log and self.config.confusion and latest is not None and latest.detail.confusion is not None:
            step = latest.progress.step
            self.log.picture("evaluation/confusion", draw(latest.detail, f"step {step}"), step)

    def _list(self, tags: list[str]) -> None:
        """Puts this run into the table of runs, once; VisualDL fails on results that have no curve yet."""
        if self.log and self.run.recipe is not None and not self._listed:
            self.log.settings(settings(self.run.recipe.model_dump(mode="json")), tags)
            self._listed = True

    def _show(self, index: int, step: int) -> None:
        loader = self.run.train_loader
        with globals_kept():
            seed_sample(loader.share.seed, 0, index)
            sample, target = loader.dataset[index]
        shown, classes = picture(sample), getattr(loader.dataset, "classes", None)
        if self.log and shown is not None:
            name = f" {classes[int(target)]}" if classes and np.size(target) == 1 else ""
            self.log.picture(f"samples/{index}{name}", png(shown), step)


def settings(recipe: dict[str, Any]) -> dict[str, int | float | str]:
    """What a recipe sets, flat and in the only types that VisualDL's table takes: `model: mlp`, `model/width: 64`.

    A column whose name has a dot in it stays empty there.
    """
    flat: dict[str, int | float | str] = {}
    for name, value in recipe.items():
        if name in ("callbacks", "name", "out", "loader"):
            continue
        for key, leaf in _leaves(name, value):
            if isinstance(leaf, bool):
                leaf = "yes" if leaf else "no"
            flat[key] = leaf if isinstance(leaf, int | float | str) else "none" if leaf is None else str(leaf)
    return flat


def _leaves(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(name, [*value] if isinstance(value, tuple) else value)]
    pairs = [(name if key == "use" else f"{name}/{key}", leaf) for key, leaf in value.items()]
    return [row for key, leaf in pairs for row in _leaves(key, leaf)]
