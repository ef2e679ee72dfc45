"""Handles an update that the judge refused: the error, or the record of it, and the line on the screen.

Everything here is collective: all ranks judge alike, and make the same refusals.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paddle_dp import checkpoint as checkpoints
from paddle_dp.batch import Batch
from paddle_dp.checkpoint.manifest import MANIFEST
from paddle_dp.checks.repeats import find_not_finite
from paddle_dp.errors import NotFiniteError, SpikeError
from paddle_dp.text import numbered
from paddle_dp.train import blame
from paddle_dp.train.judge import Refusal
from paddle_dp.train.training_state import TrainingState

_MAX_SAMPLES_SHOWN = 8  # samples of a batch that a line names


class Refusals:
    """Makes a `Refusal` of each update that the judge of a training refused, or ends the training."""

    def __init__(self, training: TrainingState):
        self._training, self.judge, self.soundness = training, training.judge, training.soundness
        self.learner, self.loader = training.learner, training.loader
        self._foreign: dict[Path, int] = {}  # checkpoints of another training, and when they were written

    def begin(self, step: int) -> None:
        """Call it before the training begins, after `step`: checkpoints of later steps in its folder belong to an
        abandoned training, and this one must not go back to them until it has replaced them."""
        if self.judge.guard.non_finite != "rewind" or not self.learner.mesh.is_main:  # it looks for all ranks
            return
        saved = checkpoints.checkpoints(self.soundness.run.folder / "checkpoints")
        self._foreign = {path: _written(path) for path in saved if checkpoints.step_of(path) > step}

    def refusal_of(self, batch: Batch, step: int, metrics: Mapping[str, float]) -> Refusal:
        """The refusal of update number `step`, which was just refused with these metrics. Collective.

        Raises NotFiniteError or SpikeError if guard.non_finite is stop, or too many batches in a row are refused.
        """
        judge, action = self.judge, self.judge.guard.non_finite
        loss, norm, samples = metrics["loss"], metrics["gradient_norm"], self._samples(batch)
        is_spike = math.isfinite(loss) and math.isfinite(norm)
        first = "" if is_spike else self._first(batch, norm)
        too_often = judge.count_refusal(step)
        if action in ("skip", "rewind") and not too_often:
            return Refusal(
                step=step, epoch=batch.epoch, batch=batch.index, samples=samples, why=judge.why, action=action,
                loss=loss, gradient_norm=norm, first=first,
                sample="" if is_spike else blame.in_batch(self.loader, batch, self.learner.mesh),
            )  # fmt: skip
        sentences = [
            f"{judge.why} at step {step}: this update was not made (guard.non_finite: {action}).",
            first,
        ]
        sentences.append(f"Its batch: {numbered('sample', samples, _MAX_SAMPLES_SHOWN)}.")
        if too_often and action != "stop":
            sentences.append(
                f"It is refusal number {judge.in_a_row} without a good update between them: guard.in_a_row allows "
                f"{judge.guard.in_a_row}."
            )
        error = (SpikeError if is_spike else NotFiniteError)(" ".join(filter(None, sentences)))
        raise self.soundness.explained(error, step)

    def repetition(self, batch: Batch, step: int) -> Refusal | None:
        """The refusal of a batch that is skipped since the training went back before it; None for any other."""
        if (batch.epoch, batch.index) not in self.judge.left_out:
            return None
        return Refusal(
            step=step, epoch=batch.epoch, batch=batch.index, samples=self._samples(batch), action="skip", again=True,
            why="this batch was refused before",
        )  # fmt: skip

    def checkpoint_before(self, step: int) -> Path | None:
        """The newest good checkpoint of at most `step` updates in the run's folder, or else the resumed checkpoint, if
        it is still there (`memory_checkpoint` removes it); None if there is none. Collective."""
        run, mesh = self.soundness.run, self.learner.mesh
        rewritten = [path for path, written in self._foreign.items() if _written(path) == written]
        path = checkpoints.newest(run.folder / "checkpoints", mesh, until=step, but=rewritten)
        if path is None and run.resumed is not None and all(mesh.gather(_written(run.resumed.folder) > 0)):
            return run.resumed.folder
        return path

    def report(self, refusal: Refusal, back_to: int | None = None) -> None:
        """Prints a refusal, and calls `refused` of all callbacks. `back_to`: the step to which the training went
        back."""
        if self.learner.mesh.is_main:
            self._print(refusal, back_to)
        if back_to is None and refusal.action == "rewind":
            refusal = replace(refusal, action="skip")
        self._training.call(self._training.moment("refused"), self._training.callbacks, refusal)

    def _print(self, refusal: Refusal, back_to: int | None) -> None:
        done = "the update was skipped" if back_to is None else f"back to the checkpoint of step {back_to}"
        if back_to is None and self.judge.guard.non_finite == "rewind" and not refusal.again:
            done += ", for there is no checkpoint to go back to yet"
        sentences = [
            f"step {refusal.step}: {refusal.why}: {done}.",
            f"Look at the data: {refusal.sample}." if refusal.sample else "",
            refusal.first,
            f"Its batch: {numbered('sample', refusal.samples, _MAX_SAMPLES_SHOWN)}.",
        ]
        print(*filter(None, sentences), file=sys.stderr, flush=True)

    def _samples(self, batch: Batch) -> list[int]:
        return [int(index) for index in self.loader.sampler.global_batch(batch.epoch, batch.index)]

    def _first(self, batch: Batch, norm: float) -> str:
        """A sentence on the source of the first number that is not finite. Collective."""
        if sentence := find_not_finite(self.learner, batch):
            return sentence
        gradient = "" if math.isfinite(norm) else self.soundness.first_gradient(self.learner.faulty_gradients)
        if gradient:
            return f"In one more forward all outputs are finite; the gradient{gradient}."
        return (
            "In one more forward of the same samples all outputs are finite: it was something random, or a fault of a "
            "device (guard.recompute looks for such)."
        )


def _written(checkpoint: Path) -> int:
    """When a checkpoint was written, in nanoseconds by its disk's clock; 0 if it is missing or incomplete."""
    try:
        return (checkpoint / MANIFEST).stat().st_mtime_ns
    except OSError:
        return 0
