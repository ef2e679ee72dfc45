"""Writes curves, mesh, recipe, settings and pictures for VisualDL to <run>/visualdl; open with `paddle-dp dashboard`.

This file has the callback; the other files of this folder each draw or count one thing. `callbacks` has the pictures
that other callbacks share.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paddle_dp.callbacks import _lines
from paddle_dp.callbacks._files import Files
from paddle_dp.callbacks._pictures import draw_confusion, picture, png
from paddle_dp.callbacks.dashboard import mesh_picture, utilisation
from paddle_dp.callbacks.dashboard.utilisation import Utilisation
from paddle_dp.callbacks.dashboard.visualdl import Log, clean_tag, flat_settings, padded
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import class_names, read_seeded
from paddle_dp.mesh import Mesh
from paddle_dp.train import Callback, Evaluation, Moment, Refusal, Run
from paddle_dp.train.gallery import Gallery
from paddle_dp.train.meter import peak_memory
from paddle_dp.units import Count, Every, Rate

__all__ = ["Config", "CurveLog", "Dashboard", "clean_tag", "memories", "padded"]

# The curve of each number of a step; other numbers (the loss and its scores) are train/<name>.
CURVES = {
    "samples_per_second": "speed/samples_per_second",
    "tokens_per_second": "speed/tokens_per_second",
    "waiting": "speed/waiting_for_data",
    "slowest_rank": "speed/slowest_rank",
    "slowest_times_others": "speed/slowest_rank_times_the_others",
    "memory": "speed/memory_megabytes",
    "sent": "speed/sent_megabytes_per_step",
}
_HIDDEN = ("seconds_per_step",)  # samples_per_second shows the same
FEW = 16  # ranks with a memory curve each; with more, the largest and the smallest are shown


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often to write a point of the curves."""

    images: Count = 0
    """Number of samples to show as pictures."""

    histograms: bool = False
    """Show histograms of all weights, every epoch; none where ranks hold parts of them."""

    confusion: bool = True
    """Show the confusion matrix of the last evaluation of a classifier."""

    peak_flops: Rate | None = None
    """Peak FLOP/s of one rank's device, for the model FLOPs utilisation; known for many GPUs."""

    def __post_init__(self) -> None:
        if self.peak_flops == 0:
            raise ValueError("peak_flops: give the peak of one device in FLOP/s, such as 312e12, not 0")

    def build(self, run: Run) -> Callback:
        return Dashboard(run, self)


class CurveLog(Protocol):
    """A log that a viewer of curves reads; the callback `tensorboard` writes another one."""

    def scalars(self, numbers: Mapping[str, float], step: int) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...

    def picture(self, tag: str, png: bytes, step: int) -> None: ...

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None: ...

    def settings(self, settings: Mapping[str, int | float | str], tags: list[str]) -> None: ...


class Dashboard(Callback):
    """Writes one VisualDL log, which a resumed run continues without repeated steps.

    Every rank contributes its memory; only the main rank writes a log.
    """

    def __init__(self, run: Run, config: Config):
        self.run, self.config, self.every = run, config, config.every
        self.log: CurveLog | None = None
        self._utilisation: Utilisation | str | None = None
        self._listed = self._histograms = False
        self._latest: tuple[int, Evaluation] | None = None

    def start(self, moment: Moment) -> None:
        if self.run.mesh.is_main:
            self._open(moment.progress.step)
            self._histograms = self.config.histograms and self._has_full_weights(moment)
        if utilisation.has_peak(self.run, self.config.peak_flops):
            self.run.mesh.wait("FLOPs counted")

    def open_log(self, step: int) -> CurveLog:
        """Opens the log, and removes its records after `step`."""
        return Log(self.run.folder / "visualdl", step, self.run.folder.name)

    def _open(self, step: int) -> None:
        """Opens the log and writes the constant entries: recipe, samples, mesh, the model's FLOPs."""
        self.log, self._listed = self.open_log(step), False
        recipe = self.run.folder / "recipe.yaml"
        if self.run.recipe is not None and recipe.exists():
            # VisualDL shows a text as one paragraph, so a mark separates the sections.
            lines = [line for line in recipe.read_text().splitlines() if not line.startswith("#")]
            marked = [line if line.startswith((" ", "-")) else f"■ {line}" for line in lines]
            self.log.text("recipe", "\n".join(marked), step)
        for index in range(min(self.config.images, len(self.run.train_loader.dataset))):
            self._show(index, step)
        self._show_mesh(step)
        if utilisation.has_peak(self.run, self.config.peak_flops):
            self._utilisation = utilisation.count(self.run, self.config.peak_flops)
            self.log.text("model FLOPs", str(self._utilisation), step)

    def step(self, moment: Moment) -> None:
        curves = rank_memories(self.run.mesh) if moment.together else {}
        if self.log:
            numbers = {n: v for n, v in moment.numbers.items() if n not in _HIDDEN}
            memory = numbers.pop("memory", None)
            # With several ranks, rank_memories has a curve for each.
            if memory is not None and self.run.mesh.ranks == 1:
                numbers["memory"] = memory / 2**20
            if "sent" in numbers:
                numbers["sent"] /= 1e6
            curves |= {CURVES.get(n, f"train/{n}"): v for n, v in numbers.items()}
            if isinstance(self._utilisation, Utilisation):
                curves |= self._utilisation.curves(numbers, len(self.run.mesh.readers))
            self.log.scalars(curves, moment.progress.step)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if self.log and refusal.action == "rewind":  # curves continue from there
            with contextlib.suppress(OSError):  # on a full disk, repeated points appear twice
                self.log = self.open_log(moment.progress.step)
        if self.log:
            self.log.scalars({"guard/refused": 1.0}, refusal.step)

    def saved(self, moment: Moment, path: Path) -> None:
        if self.log:
            tags = {f"speed/checkpoint_{name}": value for name, value in moment.numbers.items()}
            self.log.scalars(tags, moment.progress.step)

    def epoch(self, moment: Moment) -> None:
        if self.log and self._histograms:
            for name, tensor in moment.trainer.learner.placed.named_parameters():
                values = tensor.astype("float32").numpy()
                finite = values[np.isfinite(values)]  # a frozen mask may be infinite
                if not finite.size:
                    continue
                counts, edges = np.histogram(finite, bins=50)
                self.log.histogram(f"weights/{name}", counts.tolist(), edges.tolist(), moment.progress.step)

    def _has_full_weights(self, moment: Moment) -> bool:
        """Whether this rank has the full weights; prints the reason if not."""
        from paddle_dp.callbacks._gallery import cut_weights

        if reason := cut_weights(self.run, moment.trainer.learner):
            print(f"histograms: none are drawn: {reason}.", file=sys.stderr, flush=True)
        return not reason

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        if self.log is None:
            return
        tags = {f"evaluation/{name}": value for name, value in evaluation.numbers.items()}
        self.log.scalars(tags, moment.progress.step)
        self._latest = moment.progress.step, evaluation
        self._list(list(tags))

    def gallery(self, moment: Moment, gallery: Gallery) -> None:
        if self.log is None:
            return
        self.log.text("samples", str(gallery), moment.progress.step)
        if gallery.grid is not None:
            self.log.picture("evaluation/samples", gallery.grid, moment.progress.step)

    def end(self, moment: Moment) -> None:
        self._list(["train/loss"])
        if self.log is None or self._latest is None or not self.config.confusion:
            return
        step, evaluation = self._latest
        if evaluation.confusion is not None:
            self.log.picture("evaluation/confusion", draw_confusion(evaluation, f"step {step}"), step)

    def _list(self, tags: list[str]) -> None:
        """Adds this run to the table of runs, once there is a curve: VisualDL fails on results without one."""
        if self.log and self.run.recipe is not None and not self._listed:
            self.log.settings(flat_settings(self.run.recipe.model_dump(mode="json")), tags)
            self._listed = True

    def _show_mesh(self, step: int) -> None:
        mesh = self.run.mesh
        title = f"{self.run.folder.name}: {_lines.ranks(self.run)} on {mesh.device}"
        drawn = mesh_picture.draw(mesh.axes, title)
        Files().write(self.run.folder / "mesh.png", drawn)
        if self.log:
            self.log.picture("mesh", drawn, step)

    def _show(self, index: int, step: int) -> None:
        loader = self.run.train_loader
        with restoring_globals():
            sample, target = read_seeded(loader.dataset, loader.sampler.seed, 0, index)
        shown = picture(sample) if isinstance(sample, np.ndarray) else None
        if self.log and shown is not None:
            name = f"samples/{index}{_class_suffix(target, class_names(loader.dataset))}"
            self.log.picture(name, png(shown), step)


def _class_suffix(target: Any, names: Sequence[str]) -> str:
    """ " cat" for a target that is the number of this class; "" for any other target."""
    is_number = isinstance(target, np.ndarray) and target.size == 1 and target.dtype.kind in "biu"
    number = int(target.item()) if is_number else -1
    return f" {names[number]}" if 0 <= number < len(names) else ""


def rank_memories(mesh: Mesh) -> dict[str, float]:
    """The curves of the memory of all ranks; none of a single rank. Collective."""
    if mesh.ranks == 1:
        return {}
    import paddle

    local = paddle.to_tensor([peak_memory(mesh.device) / 2**20], dtype="float64")
    return memories([row.item() for row in mesh.gather_tensor(local)])


def memories(megabytes: list[float]) -> dict[str, float]:
    """A curve for each rank, or for many ranks the largest and the smallest."""
    if len(megabytes) > FEW:
        return {"memory_megabytes/largest": max(megabytes), "memory_megabytes/smallest": min(megabytes)}
    return {f"memory_megabytes/rank {rank}": size for rank, size in enumerate(megabytes)}
