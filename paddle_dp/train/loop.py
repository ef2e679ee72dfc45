"""The training loop: feeds the learner global batches, counts the progress, calls the callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from paddle_dp.checkpoint import load
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import (
    DivergenceError,
    NotFiniteError,
    StoppedError,
    TargetError,
    UsageError,
)
from paddle_dp.identity import consistency
from paddle_dp.identity.unsaved import changes_printed
from paddle_dp.mesh.heartbeat import heartbeat, on_board
from paddle_dp.parallel import Learner
from paddle_dp.recipe import Guard
from paddle_dp.recipe.folder import release
from paddle_dp.train import blame, out_of_memory, processors
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.judge import Refusal
from paddle_dp.train.measured import Measurements
from paddle_dp.train.meter import worker_averages
from paddle_dp.train.progress import Progress
from paddle_dp.train.refusals import Refusals
from paddle_dp.train.rounds import AsyncRounds
from paddle_dp.train.run import Run
from paddle_dp.train.run_folder import RunFolder, lost
from paddle_dp.train.stopping import LOST_FOLDER, StopRequests, end_interrupted
from paddle_dp.train.stragglers import Stragglers
from paddle_dp.units import Every, Length


class TrainingLoop(AsyncRounds):
    """Trains a learner on a loader's batches. `Trainer` adds `Trainer.of`, which builds the parts for a script.

    `run` has the folder and the held-out data; `check_every`: how often the ranks compare weights; `guard`: how to
    handle an update with wrong numbers. Nothing here depends on the layout: the learner was placed before.
    """

    def __init__(
        self,
        learner: Learner,
        loader: Loader,
        callbacks: Sequence[Callback] = (),
        *,
        run: Run | None = None,
        check_every: Every | None = None,
        guard: Guard | None = None,
    ):
        super().__init__(learner, loader, run or Run.plain(learner.mesh, loader), guard or Guard())
        self.check_every = check_every
        self.until = Length(0, "steps")
        self._requests = StopRequests(self.mesh)
        self._interrupted: str | None = None  # the reason
        self._folder = RunFolder(self.run.folder) if self.mesh.is_main else None
        self.empty_batches = 0  # batches without a counted target, and so without an update
        self._refusals = Refusals(self.judge, learner, loader, self.soundness)
        self._unsteady = ""  # why processors cannot be compared
        self._went_back = False  # whether the last update went back to a checkpoint
        # Collective: opens the run's folder, once all checks have passed.
        self.begin_run: Callable[[], None] = lambda: None
        self.stragglers: Stragglers | None = None
        self.measurements = Measurements(learner, loader, self.run)
        for callback in callbacks:
            self.add(callback)

    def fit(self, until: Length | str | None = None) -> Progress:
        """Trains from the current progress to `until`, counted from step 0, and returns the progress.

        `until` may be left out if the run has a length. Any exception is passed to the callbacks' `failed`, then
        raised.
        """
        if until is None and not self.run.total_steps:
            raise UsageError('fit: give a length, as in fit("3 epochs"), or give the run one.')
        until = Length(self.run.total_steps, "steps") if until is None else until
        self.until = until if isinstance(until, Length) else Length.parse(until)
        self.total_steps = self.until.steps(self.loader.batches)
        with on_board():
            try:
                self._train_to_the_end()
            except BaseException as error:
                self.callbacks.tell_failed(self._moment("failed"), error)
                raise
            finally:
                self.measurements.drop()
                heartbeat.enter("end", "closing the loader")
                self.loader.close()
                release(self.run.folder)
        return self.progress

    def _train_to_the_end(self) -> None:
        if self.mesh.ranks > 1 and self.learner.worker is None:
            self.stragglers = Stragglers(self.mesh, self._shares())
        requests = StopRequests(self.mesh, self.run.max_time, stragglers=self.stragglers, folder=self._folder)
        with requests as self._requests:
            self._refusals.begin(self.progress.step)
            consistency.compare_starts(self.progress.step, self.total_steps, self.callbacks, self.mesh)
            self.tell_refuse()
            self.begin_run()
            if self._folder is not None:
                self._folder.begin()
            with changes_printed(self.learner, self.progress.step):
                self.tell_start()
            self.check("before the first update", states=True)
            if self.learner.worker is None:
                self.measurements.plan(self.progress.step, self.total_steps)
            self._train()
            if self._interrupted:
                self._interrupt(self._interrupted)
        heartbeat.enter("end", "the last checks")
        self.learner.weights.finalize()
        self.learner.statistics.sync()  # the caller gets the same model on every rank, saved or not
        self.check("at the end of the training")
        self.look_at_itself()
        with end_interrupted(self.progress.step, self.callbacks) as ended:
            self._call_end(ended)
        if self._folder is not None and self._folder.is_lost(now=True):
            raise lost(self.run.folder, self.progress.step)

    def _call_end(self, ended: list[Callback]) -> None:
        """Calls `end` of all callbacks, and adds each that has returned to `ended`."""
        moment = self._moment("end")

        def end(callback: Callback) -> None:
            callback.end(moment)
            ended.append(callback)

        # The last evaluation and checkpoint may fail: success is reported after them.
        for reads in (False, True):
            self._call("end", [c for c in self.callbacks if c.reads is reads], end)

    def _shares(self) -> list[int]:
        """How many samples of a full batch each rank computes."""
        axes, sampler = self.mesh.axes, self.loader.sampler
        return [sampler.samples_of_rank(axes.dp_rank(rank), axes.dp_size) for rank in range(self.mesh.ranks)]

    def _interrupt(self, reason: str) -> NoReturn:
        """Lets the callbacks save, and raises StoppedError."""
        moment = self._moment("interrupted")
        self._call("interrupted", self.callbacks, lambda c: c.interrupted(moment))
        if reason == LOST_FOLDER:
            raise lost(self.run.folder, self.progress.step)
        raise StoppedError(
            f"stopped by {reason} after step {self.progress.step} of {self.total_steps}: the training is not done."
        )

    def _train(self) -> None:
        self.meter.read()
        heartbeat.first = heartbeat.step = self.progress.step
        heartbeat.enter("data")
        if self.learner.worker is not None:
            self._train_in_rounds()
            return
        with self.learner.training():
            self._update_until_the_end()

    def _update_until_the_end(self) -> None:
        while self.progress.step < self.total_steps and not (self.stopped or self._interrupted):
            for batch in self.loader.read(self.progress.epoch, self.progress.batch):
                self._update(batch)
                if (
                    self._went_back
                    or self.stopped
                    or self._interrupted
                    or self.progress.step >= self.total_steps
                ):
                    break
            if self.progress.batch >= self.loader.batches and not self._interrupted:
                self.progress = self.progress.next_epoch()
                self._call_epoch()

    def _update(self, batch: Batch) -> None:
        step = self.progress.step + 1
        last = step >= self.total_steps
        due = self.callbacks.due_at_step(step, last)
        reads = any(callback.reads for callback in due)
        rate = self.learner.optimizer.get_lr() if reads else 0.0
        refusal, metrics = self._refusals.repetition(batch, step), None
        if refusal is not None:
            self.learner.skip_update()
        else:
            metrics = self._learn(batch, reads)
            if self.judge.why and metrics is not None:
                refusal = self._refusals.refusal_of(batch, step, metrics)
        self._went_back = refusal is not None and refusal.action == "rewind" and self._go_back(refusal)
        if self._went_back:
            return
        if refusal is None:
            self.judge.accepted(step)
        self._advance(batch)
        if self.learner.empty:
            self._print_empty(batch)
        self.meter.add(batch.samples, batch.waited)
        if self.check_every is not None and self.check_every.due_at_step(step):
            self.check(f"after step {step}")
        if refusal is not None:
            due = [callback for callback in due if not callback.reads]
            self._tell_refused(refusal)
        if due:
            numbers = (
                self._numbers(metrics, rate, batch)
                if reads and metrics is not None and refusal is None
                else {}
            )
            moment = Moment(name="step", progress=self.progress, trainer=self, numbers=numbers)
            self._call("step", due, lambda c: c.step(moment))
        self._check_processors(batch, step)
        if not last and not self.stopped:
            self._interrupted = self._requests.due(step)
        self._measure(step, batch)
        heartbeat.enter("data")

    def _advance(self, batch: Batch) -> None:
        """Counts an update that was made or skipped."""
        self.progress = self.progress.advance(batch.samples)
        if self.averages is not None:
            self.averages.update(self.progress.step)
        heartbeat.step = self.progress.step

    def _measure(self, step: int, batch: Batch) -> None:
        """If due, begins to measure where the time of steps goes, or reports it. Collective."""
        if step != self.measurements.due:
            return
        self.learner.weights.wait()
        with self.meter.paused():
            measured = self.measurements.after(step, batch)
        if measured is not None:
            moment = self._moment("measured")
            self._call("measured", self.callbacks, lambda c: c.measured(moment, measured))

    def _check_processors(self, batch: Batch, step: int) -> None:
        """If due (guard.recompute), raises ProcessorError if ranks compute different gradients. Collective."""
        every = self.judge.guard.recompute
        if every is None or self._unsteady or not every.due_at_step(step):
            return
        self.learner.weights.wait()
        with self.meter.paused():
            self._unsteady = processors.check(self.learner, batch, f"after step {step}")
        if self._unsteady and self.mesh.is_main:
            print(self._unsteady, file=sys.stderr, flush=True)

    def _learn(self, batch: Batch, collect_metrics: bool) -> dict[str, float] | None:
        self.judge.why = ""
        accept = self.judge.accept if self.judge.judges else None
        try:
            return self.learner.train_batch(batch, collect_metrics, accept)
        except NotFiniteError as error:
            raise self.soundness.explained(error, self.progress.step) from None
        except DivergenceError as error:
            raise DivergenceError(f"step {self.progress.step + 1}: {error}") from None
        except (MemoryError, OSError) as error:
            if not out_of_memory.is_cause(error):
                raise
            raise out_of_memory.explained(error, self.learner, self.mesh, self.progress.step + 1) from None
        except TargetError as error:
            raise blame.bad_target(self.loader, batch.epoch, batch.index, error) from None

    def _go_back(self, refusal: Refusal) -> bool:
        """Restores the newest checkpoint; the batch is then skipped when the training reaches it again. False if there
        is no checkpoint: then the update is skipped. Collective."""
        moment = self._moment("rewinding")
        self._call("rewinding", self.callbacks, lambda c: c.rewinding(moment))
        with self.meter.paused(), heartbeat.within("checkpoint", "going back to the last one"):
            path = self._refusals.checkpoint_before(self.progress.step)
            if path is None:
                return False
            checkpoint, batch = load(path, self.mesh), (refusal.epoch, refusal.batch)
            self._restore(checkpoint)
            self.judge.go_back(checkpoint.state.get("guard"), batch)
        heartbeat.step = self.progress.step
        self.measurements.drop()
        self._requests.went_back()
        self._tell_refused(refusal, back_to=self.progress.step)
        heartbeat.enter("data")
        return True

    def _tell_refused(self, refusal: Refusal, back_to: int | None = None) -> None:
        """Prints the refusal, and calls `refused` of all callbacks."""
        self._refusals.show(refusal, back_to)
        if back_to is None and refusal.action == "rewind":
            refusal = replace(refusal, action="skip")
        moment = self._moment("refused")
        self._call("refused", self.callbacks, lambda c: c.refused(moment, refusal))

    def _print_empty(self, batch: Batch) -> None:
        """Prints a line for the first, tenth, hundredth and thousandth batch without an update: it may be a mistake."""
        self.empty_batches += 1
        if self.mesh.is_main and self.empty_batches in (1, 10, 100, 1000):
            often = f" ({self.empty_batches} batches so far)" if self.empty_batches > 1 else ""
            print(
                f"step {self.progress.step}: not one target of this global batch of {batch.samples} samples counts, so "
                f"no update was made from it{often}. Look at the data, and at the targets that the loss ignores "
                "(loss.ignore_index).",
                file=sys.stderr,
                flush=True,
            )

    def _numbers(self, metrics: dict[str, float], rate: float, batch: Batch) -> dict[str, float]:
        """The metrics of the update just done, its learning rate and the speed. Raises NotFiniteError, on every rank,
        if the loss or the gradient norm is not finite.
        """
        scale = self.learner.mixed.scale
        if not math.isfinite(metrics["loss"]) and not self.learner.empty:
            self.soundness.refuse_loss(metrics["loss"], self.progress.step, self.learner.local_loss)
        # With a loss scale, an update with overflowing gradients is skipped instead.
        if not math.isfinite(metrics["gradient_norm"]) and scale is None:
            faulty = self.learner.faulty_gradients
            self.soundness.refuse_gradients(metrics["gradient_norm"], faulty, self.progress.step)
        speed = self.meter.read(batch)
        if self.mesh.axes.servers:  # server 0 writes the lines, and has no samples
            rows = self.mesh.gather(speed)
            speed = worker_averages(rows, self.mesh.axes.servers) if self.mesh.is_main else speed
        numbers = {**metrics, "lr": rate, **speed}
        if self.stragglers is not None and (slowest := self.stragglers.slowest) is not None:
            numbers |= {"slowest_rank": float(slowest.rank), "slowest_times_others": slowest.times}
        return numbers | ({"loss_scale": scale.scale} if scale else {})
