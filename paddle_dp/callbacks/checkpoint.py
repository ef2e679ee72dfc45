"""Saves checkpoints at an interval and at the end; keeps the newest few, and the best by a held-out number."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks import _evaluated_number, _schedule_state
from paddle_dp.checkpoint import BackgroundSave, HostMemory, NotWrittenError
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import Callback, Evaluation, Moment, Progress, Refusal, Run
from paddle_dp.units import Every, Positive

Numbers = Mapping[str, Any]
_SAMPLE_COUNT = "held_out"  # in best.json: the samples of the evaluation
_WAITED = 0.2  # seconds of waiting for the previous checkpoint that are worth a line


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every | None = Every.parse("1 epoch")
    """How often to save; null saves only at the end (and the best)."""

    keep: Positive = 3
    """Number of the newest checkpoints to keep."""

    best: str | None = None
    """Keep the best, too, by this number of the evaluations, such as acc1 or loss."""

    async_: bool = False
    """Copy a rank's part to memory and write it in the background while the training continues."""

    def build(self, run: Run) -> Callback:
        return CheckpointCallback(run, self)


@dataclass(kw_only=True)
class _Writing:
    """A checkpoint that is being written in the background, the seconds that it stalled training, and its numbers."""

    save: BackgroundSave = field(init=False)
    progress: Progress
    stalled: float = 0.0
    waited: float
    best: Numbers | None  # the numbers that make it the best
    next_look: int  # the step after which the ranks poll next

    def look_later(self, step: int) -> None:
        """Doubles the gap to the next poll, so that the number of polls is logarithmic in the steps."""
        self.next_look = step + max(step - self.progress.step, 1)


class CheckpointCallback(Callback):
    """Saves on all ranks together, at most once per step, in <run>/checkpoints.

    Weights that are not finite, or differ between ranks, are never saved: the trainer's `snapshot` raises instead.
    `evaluated` chooses the best, so an evaluation may precede or follow a save.

    A disk that refuses a checkpoint, unless it is the last, does not end the training: a line reports it (a short one
    if the previous checkpoint failed for the same reason), older checkpoints stay, and the next one is tried as usual.
    `async` writes one checkpoint at a time in the background; the next one, the end, a request to stop and an error
    wait for it.
    """

    reads = False
    saves_at_end = True

    def __init__(self, run: Run, config: Config):
        self.run, self.config, self.every = run, config, config.every
        self.folder = run.folder / "checkpoints"
        self._saved: tuple[int, Path] | None = None
        self._best: float | None = None  # the number of the checkpoint that is named the best
        self._writing: _Writing | None = None
        self._memory = HostMemory() if config.async_ else None
        self._waits = 0
        self._refused_for = ""  # why the disk refused the last checkpoint; "" if it did not

    def due_at_step(self, step: int) -> bool:
        looks = self._writing is not None and step >= self._writing.next_look
        return looks or self._saves_at_step(step)

    def _saves_at_step(self, step: int) -> bool:
        return self.every is not None and self.every.due_at_step(step)

    def due_at_epoch(self, epochs: int) -> bool:
        return self.every is not None and self.every.due_at_epoch(epochs)

    def refuse(self, moment: Moment) -> None:
        others = [each for each in moment.trainer.callbacks if isinstance(each, CheckpointCallback)]
        settings = [each.config for each in others if each.folder.resolve() == self.folder.resolve()]
        if len(settings) > 1 and any(config.async_ for config in settings):
            raise UsageError(
                f"callbacks.checkpoint: {len(settings)} of them save in {self.folder}, where nothing else may be saved "
                "while async writes. Keep one of them, or leave async out."
            )
        _schedule_state.refuse_unsaved(moment)
        if self.config.best:
            _evaluated_number.refuse_unknown(self.config.best, self.run, moment, "checkpoint.best")

    def start(self, moment: Moment) -> None:
        resumed, step = self.run.resumed, moment.progress.step
        if resumed is not None and self.run.mesh.is_main:
            self._set_aside(step)
        if resumed is not None and resumed.folder.parent.resolve() == self.folder.resolve():
            self._saved = (step, resumed.folder)
        if self.config.best:
            remembered = self._remembered(step) if self.run.mesh.is_main else None
            self._best = self.run.mesh.gather(remembered)[0]

    def _set_aside(self, step: int) -> None:
        """Moves the checkpoints of an abandoned training, of steps after `step`, aside: they would stay the newest, and
        those saved from here on would be deleted before them."""
        try:
            moved = checkpoints.set_aside(self.folder, step)
        except CheckpointError as error:
            self._warn(f"{error} The training goes on.")
            return
        if moved is not None:
            later = f"later checkpoints ({', '.join(path.name for path in moved[0])}) are now in {moved[1]}"
            self._warn(f"The training continues from step {step}; {later}.")

    def step(self, moment: Moment) -> None:
        if self._saves_at_step(moment.progress.step):
            self._save(moment)
        elif self._writing is not None:
            self._finish(moment, wait=False)

    def epoch(self, moment: Moment) -> None:
        self._save(moment)

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        name = self.config.best
        # A model with a loss that is not finite is never the best, even with a better accuracy.
        if name is None or evaluation.not_finite:
            return
        value = _evaluated_number.read(name, evaluation, "checkpoint.best")
        writing = self._writing
        if writing is not None and writing.best is not None and writing.save.step != moment.progress.step:
            self._finish(moment)  # it may be refused, and is not to be compared with then
        if _evaluated_number.better(name, value, than=self._best):
            self._save(moment, {**evaluation.numbers, _SAMPLE_COUNT: evaluation.samples})

    def rewinding(self, moment: Moment) -> None:
        self._finish(moment)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if self._saved and self._saved[0] != moment.progress.step and refusal.action == "rewind":
            self._saved = None  # a damaged, later one: the rewind skipped it, and its step is repeated

    def interrupted(self, moment: Moment) -> None:
        self._save_now(moment)

    def end(self, moment: Moment) -> None:
        self._save_now(moment)

    def failed(self, moment: Moment, error: BaseException) -> None:
        """Waits for the checkpoint in the background, which predates the error; a second Ctrl-C does not wait."""
        if self._writing is not None and isinstance(error, Exception):
            with heartbeat.within("checkpoint", "the one that was being written"):
                self._writing.save.finish_alone()

    def _save_now(self, moment: Moment) -> None:
        """Saves and waits until the checkpoint is in place. Raises NotWrittenError, since nothing is saved later."""
        self._finish(moment)
        self._save(moment, last=True)

    def _save(self, moment: Moment, best: Numbers | None = None, last: bool = False) -> None:
        """Saves this step's checkpoint, unless it exists or is being written. Collective.

        `best`: the numbers that make it the best. `last`: saves in the foreground, and a failure is an error.
        """
        step, writing = moment.progress.step, self._writing
        if writing is not None and writing.save.step == step:
            if best is not None:
                writing.best = best
                self._finish(moment, wait=False)  # if it is in place already, `_placed` did not name it
            return
        if self._saved and self._saved[0] == step:
            self._name_best(self._saved[1], best)
            return
        began = time.perf_counter()
        self._finish(moment)
        waited = time.perf_counter() - began
        self._warn_waited(step, waited)
        if self.run.mesh.is_main:
            with suppress(OSError):  # a killed job's folder, of which the start saw too little
                checkpoints.clean(self.folder)
        try:
            with heartbeat.within("checkpoint"):
                snapshot = moment.trainer.snapshot(self._memory)
                if self._memory is None or last:
                    writing_began = time.perf_counter()
                    path = checkpoints.save(snapshot, self.folder, self.run.mesh)
                    wrote = time.perf_counter() - writing_began
                    self._tidy(path)
                else:
                    writing = _Writing(progress=moment.progress, waited=waited, best=best, next_look=step + 1)
                    placed = partial(self._placed, writing)
                    writing.save = BackgroundSave(snapshot, self.folder, self.run.mesh, placed)
        except NotWrittenError as error:
            if last:
                raise
            self._tell_failure(moment, error, moment.progress)
            return
        stalled = time.perf_counter() - began
        if self._memory is None or last:
            self._tell(moment, path, moment.progress, best, _seconds(stalled, waited, wrote))
            return
        assert writing is not None, "made above"
        writing.stalled, self._writing = stalled, writing

    def _finish(self, moment: Moment, wait: bool = True) -> None:
        """Reports the checkpoint in the background if it is done; `wait` waits for it. Collective."""
        writing = self._writing
        if writing is None:
            return
        began = time.perf_counter()
        try:
            if wait:
                with heartbeat.within("checkpoint", "the one before is being written"):
                    writing.save.wait()
            elif not writing.save.poll():
                writing.look_later(moment.progress.step)
                writing.stalled += time.perf_counter() - began
                return
        except NotWrittenError as error:
            self._writing = None
            self._tell_failure(moment, error, writing.progress)
            return
        self._writing = None
        seconds = _seconds(writing.stalled, writing.waited, writing.save.seconds)
        self._tell(moment, writing.save.path, writing.progress, writing.best, seconds)

    def _tell(
        self, moment: Moment, path: Path, progress: Progress, best: Numbers | None, seconds: Numbers
    ) -> None:
        self._saved, self._refused_for = (progress.step, path), ""
        moment.trainer.tell_saved(path, progress, seconds)
        self._name_best(path, best)

    def _tell_failure(self, moment: Moment, error: NotWrittenError, progress: Progress) -> None:
        """Reports a failed save, in full the first time for a reason, then shortly; the training continues."""
        is_over = moment.progress.step >= moment.trainer.total_steps
        if error.reason and error.reason == self._refused_for:
            if self.run.mesh.is_main:
                self._warn(checkpoints.still_not(progress.step, error.reason, self.folder))
        elif is_over or moment.name in ("end", "interrupted"):
            self._warn(f"{error.message} One more is tried, the last: make room.")
        else:
            next_one = "The training goes on, and tries again at the next checkpoint: make room."
            self._warn(f"{error.message} {next_one}")
        self._refused_for = error.reason
        moment.trainer.tell_save_failed(error, progress)

    def _placed(self, writing: _Writing, path: Path) -> None:
        """Names and prunes in the writing thread, because a kill may precede the next poll."""
        if writing.best is not None:
            self._write_best(path, writing.best)
        else:
            self._tidy(path)

    def _name_best(self, path: Path, numbers: Numbers | None) -> None:
        """Names the checkpoint at `path` the best, if it has the `numbers` for it. Collective."""
        if numbers is not None and self.run.mesh.gather(self._write_best(path, numbers))[0]:
            self._best = float(numbers[str(self.config.best)])

    def _write_best(self, path: Path, numbers: Numbers) -> bool:
        """Writes best.json on the main rank. Returns whether it is written."""
        if not self.run.mesh.is_main:
            return False
        try:
            checkpoints.set_best(self.folder, path, numbers)
        except CheckpointError as error:
            self._warn(f"{error} The training goes on, and {path.name} is not kept as the best.")
            return False
        finally:
            self._tidy(path)  # the previous best may be deleted
        return True

    def _tidy(self, path: Path) -> None:
        """Deletes old checkpoints after the one at `path` is in place."""
        if self.run.mesh.is_main:
            try:
                checkpoints.prune(self.folder, self.config.keep, trusted=path)
            except CheckpointError as error:
                self._warn(f"{error} The training goes on.")

    def _warn_waited(self, step: int, waited: float) -> None:
        if waited < _WAITED:
            return
        self._waits += 1
        if self._waits in (1, 10, 100, 1000):
            often = f" ({self._waits} times so far)" if self._waits > 1 else ""
            self._warn(
                f"The checkpoint of step {step} waited {waited:.1f} s for the one before to be written{often}: they "
                "come faster than this disk takes them. A longer callbacks.checkpoint.every avoids it."
            )

    def _warn(self, line: str) -> None:
        if self.run.mesh.is_main:
            print(line, file=sys.stderr, flush=True)

    def _remembered(self, step: int) -> float | None:
        """The best number so far; None if it is of a step after `step`, where the run resumes, or of other samples."""
        best, samples = checkpoints.best(self.folder), self.run.evaluation_samples
        if best is None or checkpoints.step_of(best) > step:
            return None
        numbers = checkpoints.best_numbers(self.folder)
        if (before := numbers.get(_SAMPLE_COUNT, samples)) != samples:
            self._warn(
                f"{best.name} was the best of {before} held-out samples, and {samples} are evaluated now: the best is "
                "chosen anew."
            )
            return None
        return numbers.get(str(self.config.best))


def _seconds(stalled: float, waited: float, wrote: float) -> dict[str, float]:
    seconds = {"stalled": stalled, "waiting": waited, "writing": wrote}
    return {f"seconds_{name}": round(value, 4) for name, value in seconds.items()}
