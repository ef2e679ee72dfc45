"""Saves checkpoints at an interval and at the end; keeps the newest few, and the best by a held-out number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks import _watched
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import Callback, Evaluation, Moment, Refusal, Run
from paddle_dp.units import Every, Positive


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every | None = Every.parse("1 epoch")
    """How often to save; null: at the end (and the best) only."""

    keep: Positive = 3
    """Number of the newest checkpoints to keep."""

    best: str | None = None
    """Keep the best, too, by this number of the evaluations, such as acc1 or loss."""

    def build(self, run: Run) -> Callback:
        return Checkpoint(run, self)


class Checkpoint(Callback):
    """Saves on all ranks together, at most once per step, in <run>/checkpoints.

    Weights that are not finite, or differ between ranks, are never saved: the trainer's `snapshot` raises instead. The
    best is chosen in `evaluated`, so an evaluation may come before or after a save.
    """

    reads = False

    def __init__(self, run: Run, config: Config):
        self.run, self.config, self.every = run, config, config.every
        self.folder = run.folder / "checkpoints"
        self._saved: tuple[int, Path] | None = None
        self._best: float | None = None

    def due_at_step(self, step: int) -> bool:
        return self.every is not None and super().due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        return self.every is not None and self.every.due_at_epoch(epochs)

    def start(self, moment: Moment) -> None:
        resumed = self.run.resumed
        if resumed is not None and resumed.folder.parent.resolve() == self.folder.resolve():
            self._saved = (moment.progress.step, resumed.folder)
        if self.config.best:
            _watched.refuse_unknown(self.config.best, moment, "checkpoint.best")
            mine = self._remembered(moment.progress.step) if self.run.mesh.is_main else None
            self._best = self.run.mesh.gather(mine)[0]

    def step(self, moment: Moment) -> None:
        self._save(moment)

    def epoch(self, moment: Moment) -> None:
        self._save(moment)

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        name = self.config.best
        # A model whose loss is not finite is never the best, whatever its accuracy.
        if name is None or evaluation.not_finite:
            return
        value = _watched.read(name, evaluation, "checkpoint.best")
        if _watched.better(name, value, than=self._best):
            self._best, path = value, self._save(moment)
            if self.run.mesh.is_main:
                checkpoints.set_best(self.folder, path, evaluation.numbers)
                checkpoints.prune(
                    self.folder, self.config.keep, trusted=path
                )  # the previous best may be deleted

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if self._saved and self._saved[0] != moment.progress.step and refusal.action == "rewind":
            self._saved = None  # a later one, which was damaged: its step comes again

    def interrupted(self, moment: Moment) -> None:
        self._save(moment)

    def end(self, moment: Moment) -> None:
        self._save(moment)

    def _save(self, moment: Moment) -> Path:
        """The checkpoint of this step, saved now unless it is there. Collective."""
        trainer, step = moment.trainer, moment.progress.step
        if self._saved and self._saved[0] == step:
            return self._saved[1]
        with heartbeat.within("checkpoint"):
            path = checkpoints.save(trainer.snapshot(), self.folder, self.run.mesh)
            self._saved = (step, path)
            if self.run.mesh.is_main:
                checkpoints.prune(self.folder, self.config.keep, trusted=path)
        trainer.tell_saved(path)
        return path

    def _remembered(self, step: int) -> float | None:
        """The best number so far, unless it was recorded after the step we resume from."""
        best = checkpoints.best(self.folder)
        if best is None or checkpoints.step_of(best) > step:
            return None
        return checkpoints.best_numbers(self.folder).get(str(self.config.best))
