"""Ends the training when a held-out number has not improved for `patience` evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass

from paddle_dp.callbacks import _evaluated_number
from paddle_dp.callbacks._files import Files
from paddle_dp.train import Callback, Evaluation, Moment, Run
from paddle_dp.units import Positive, Rate


@dataclass(frozen=True, kw_only=True)
class Config:
    watch: str = "loss"
    """A number of the evaluations; costs (loss, error, …) should fall, all others rise."""

    patience: Positive = 5
    """Number of evaluations without improvement after which training ends."""

    by: Rate = 0.0
    """Difference that an improvement must exceed."""

    def build(self, run: Run) -> Callback:
        return EarlyStop(run, self)


class EarlyStop(Callback):
    """Decides the same on every rank, because evaluations are equal; keeps its history in a file for a resume."""

    reads = False

    def __init__(self, run: Run, config: Config):
        self.run, self.config = run, config
        self.path, self._files = run.folder / "early_stop.json", Files()
        self.history: list[list[float]] = []

    def refuse(self, moment: Moment) -> None:
        _evaluated_number.refuse_unknown(self.config.watch, self.run, moment, "early_stop.watch")

    def start(self, moment: Moment) -> None:
        saved = self._read() if self.run.mesh.is_main else []
        history = self.run.mesh.gather(saved)[0]
        self.history = [[step, value] for step, value in history if step <= moment.progress.step]
        if self.history:
            self._write(self.run.evaluation_samples)  # it may be of another folder
            self._stop(moment, "; a higher callbacks.early_stop.patience trains on")

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        step = moment.progress.step
        value = _evaluated_number.read(self.config.watch, evaluation, "early_stop.watch")
        self.history = [*(row for row in self.history if row[0] < step), [step, value]]
        self._write(evaluation.samples)
        self._stop(moment)

    def _stop(self, moment: Moment, remedy: str = "") -> None:
        """Stops the training if its patience is over; `remedy`: how a resumed one can train on."""
        best, waited, trainer = *self._waited(), moment.trainer
        is_over = trainer.early_end or moment.progress.step >= trainer.total_steps
        if waited >= self.config.patience and not is_over:
            reason = f"{self.config.watch} did not improve in {waited} evaluations"
            trainer.stop(f"{reason}; the best was {best[1]:.6g} at step {best[0]:g}{remedy}")

    def _waited(self) -> tuple[list[float], int]:
        """The best evaluation so far, [step, value], and the number of evaluations since."""
        best, waited, watch, by = self.history[0], 0, self.config.watch, self.config.by
        for row in self.history:
            if row is best or _evaluated_number.better(watch, row[1], than=best[1], by=by):
                best, waited = row, 0
            else:
                waited += 1
        return best, waited

    def _write(self, samples: int) -> None:
        if self.run.mesh.is_main:
            content = {"watch": self.config.watch, "history": self.history, "held_out": samples}
            self._files.write(self.path, json.dumps(content).encode())

    def _read(self) -> list[list[float]]:
        """The history in the run's folder, or else in the folder of the resumed checkpoint's run."""
        path, resumed = self.path, self.run.resumed
        if resumed is not None and not path.exists():
            path = resumed.folder.parent.parent / path.name
        try:
            content = json.loads(path.read_bytes())
            samples = self.run.evaluation_samples
            same = content["watch"] == self.config.watch and content.get("held_out", samples) == samples
            return [[int(step), float(value)] for step, value in content["history"]] if same else []
        except (OSError, ValueError, KeyError, TypeError):
            return []
