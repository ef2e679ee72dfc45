"""Evaluates on every held-out sample, at an interval and at the end; writes <run>/evaluation.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.callbacks._files import Files
from paddle_dp.callbacks._pictures import draw_confusion
from paddle_dp.train import Callback, Evaluation, Moment, Refusal, Run
from paddle_dp.train.evaluation import as_json
from paddle_dp.units import Every


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("1 epoch")
    """How often to evaluate."""

    per_class: bool = True
    """Write precision, recall and F1 of each class, for classifiers."""

    confusion: bool = True
    """Write the confusion matrix, for classifiers; at the end of training also as <run>/confusion.png."""

    def build(self, run: Run) -> Callback:
        return Evaluate(run, self)


class Evaluate(Callback):
    """Evaluates on all ranks together, at most once per step; the trainer passes the result to all callbacks.

    Without held-out data it does nothing.
    """

    reads = False
    evaluates_at_end = True

    def __init__(self, run: Run, config: Config):
        self.run, self.config, self.every = run, config, config.every
        self._files = Files()
        self._step, self._evaluation = -1, Evaluation(numbers={}, samples=0)

    def due_at_epoch(self, epochs: int) -> bool:
        return self.config.every.due_at_epoch(epochs)

    def step(self, moment: Moment) -> None:
        self._evaluate(moment)

    def epoch(self, moment: Moment) -> None:
        self._evaluate(moment)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if refusal.action == "rewind":  # evaluated steps are repeated
            self._step = -1

    def end(self, moment: Moment) -> None:
        """Evaluates, and draws the picture only now, because that may take longer than the evaluation."""
        self._evaluate(moment)
        if self.run.mesh.is_main and self.config.confusion and self._evaluation.confusion is not None:
            drawn = draw_confusion(self._evaluation, f"step {self._step}")
            self._files.write(self.run.folder / "confusion.png", drawn)

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        """Writes evaluation.json, also after another caller's evaluation."""
        self._step, self._evaluation = moment.progress.step, evaluation
        if not self.run.mesh.is_main:
            return
        content = as_json(self._content(moment, evaluation), to_read=True).encode()
        self._files.write(self.run.folder / "evaluation.json", content)

    def _evaluate(self, moment: Moment) -> None:
        if self.run.test_loader is not None and moment.progress.step != self._step:
            moment.trainer.evaluate()

    def _content(self, moment: Moment, evaluation: Evaluation) -> dict[str, Any]:
        content: dict[str, Any] = {"epoch": moment.progress.epoch, "step": moment.progress.step}
        content |= evaluation.content
        if self.config.per_class and evaluation.confusion is not None:
            content["per_class"] = evaluation.per_class()
        if self.config.confusion and evaluation.confusion is not None:
            content["confusion"] = evaluation.confusion.tolist()
        return content
