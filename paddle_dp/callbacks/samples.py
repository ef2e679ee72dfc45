"""Shows held-out samples with the model's answers: a classifier's worst predictions, or texts that it continues.

Writes <run>/samples.json, which report.html shows, and <run>/samples.png; dashboards and trackers show them, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from paddle_dp.callbacks._files import Files
from paddle_dp.errors import message_of
from paddle_dp.train import Callback, Moment, Refusal, Run
from paddle_dp.train.evaluation import as_json
from paddle_dp.train.gallery import Gallery
from paddle_dp.units import Every, Positive

_MOST = 24


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every | None = None
    """How often to show them; `null`: at the end only."""

    count: Positive = 8
    """Number of samples to show, at most 24."""

    scan: Positive = 512
    """Number of held-out samples, evenly spread, of which the worst predictions are shown."""

    tokens: Positive = 48
    """Number of tokens by which texts are continued."""

    def __post_init__(self) -> None:
        if self.count > _MOST:
            raise ValueError(f"count: {self.count} samples are more than a page shows; give at most {_MOST}")

    def build(self, run: Run) -> Callback:
        return SampleGallery(run, self)


class SampleGallery(Callback):
    """Computes the samples on the main rank while the others wait; without whole weights there it says why not."""

    reads = False

    def __init__(self, run: Run, config: Config):
        self.run, self.config = run, config
        self._files = Files()
        self._step = -1
        self._obstacle = ""

    def due_at_step(self, step: int) -> bool:
        return self.config.every is not None and self.config.every.due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        return self.config.every is not None and self.config.every.due_at_epoch(epochs)

    def start(self, moment: Moment) -> None:
        from paddle_dp.callbacks import _gallery

        self._obstacle = _gallery.obstacle(self.run, moment.trainer.learner)
        if self._obstacle:
            self._print(f"shows nothing: {self._obstacle}.")

    def step(self, moment: Moment) -> None:
        if moment.together:
            self._show(moment)

    def epoch(self, moment: Moment) -> None:
        if moment.together:
            self._show(moment)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if refusal.action == "rewind":  # steps are repeated
            self._step = -1

    def end(self, moment: Moment) -> None:
        self._show(moment)

    def gallery(self, moment: Moment, gallery: Gallery) -> None:
        self._files.write(self.run.folder / "samples.json", as_json(
            {"step": moment.progress.step, **gallery.content}, to_read=True).encode())  # fmt: skip
        if gallery.grid is not None:
            self._files.write(self.run.folder / "samples.png", gallery.grid)

    def _show(self, moment: Moment) -> None:
        """Computes the samples of this step, once, and passes them to all callbacks of the main rank. Collective."""
        if self._obstacle or self._step == moment.progress.step:
            return
        self._step, learner = moment.progress.step, moment.trainer.learner
        learner.weights.wait()
        with learner.weights.means():
            learner.statistics.sync()
            gallery = self._computed(moment) if self.run.mesh.is_main else None
            self.run.mesh.wait("samples shown")
        if gallery is not None:
            moment.trainer.tell_gallery(gallery)

    def _computed(self, moment: Moment) -> Gallery | None:
        from paddle_dp.callbacks import _gallery

        config, learner = self.config, moment.trainer.learner
        try:
            gallery = _gallery.gallery(self.run, learner, config.count, config.scan, config.tokens)
        except Exception as error:  # noqa: BLE001 - a picture must not end a training
            self._print(f"failed: {message_of(error).rstrip('.')}. The training goes on without it.")
            return None
        if gallery is None:
            self._print(
                "shows nothing: the model neither classifies its samples nor writes texts of data with a tokenizer."
            )
        return gallery

    def _print(self, sentence: str) -> None:
        if self.run.mesh.is_main:
            print(f"callback samples {sentence}", file=sys.stderr, flush=True)
