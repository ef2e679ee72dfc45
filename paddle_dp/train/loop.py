"""The training loop: feeds the learner global batches, counts the progress, calls the callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from paddle_dp.checkpoint import Checkpoint, Checks, HostMemory, Snapshot, load
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import (
    CheckpointError,
    DivergenceError,
    NotFiniteError,
    StoppedError,
    TargetError,
    UsageError,
)
from paddle_dp.mesh.heartbeat import heartbeat, on_board
from paddle_dp.parallel import Learner
from paddle_dp.parallel.ema import Averages
from paddle_dp.recipe import Ema, Guard
from paddle_dp.recipe.folder import release
from paddle_dp.train import blame, consistency, out_of_memory, processors, state
from paddle_dp.train.callback import Callback, Moment, Name
from paddle_dp.train.evaluate import evaluate, names_of_numbers
from paddle_dp.train.evaluation import EMA, Evaluation
from paddle_dp.train.judge import Judge, Refusal
from paddle_dp.train.measured import Measurements
from paddle_dp.train.meter import Meter
from paddle_dp.train.overrides import is_overridden, refuse_overrides
from paddle_dp.train.progress import Progress
from paddle_dp.train.refusals import Refusals
from paddle_dp.train.run import Run
from paddle_dp.train.sound import Soundness
from paddle_dp.train.stopping import StopRequests
from paddle_dp.train.stragglers import Stragglers
from paddle_dp.train.unsaved import Unsaved, changes_printed
from paddle_dp.units import Every, Length


class TrainingLoop:
    """Trains a learner on a loader's batches. `Trainer` adds `Trainer.of`, which builds the parts for a script.

    `run` has the folder and the held-out data; `check_every`: how often the ranks compare weights; `guard`: what is
    done about an update whose numbers are wrong.
    Nothing here depends on the layout: the learner was placed before.
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
        self.learner, self.loader, self.mesh = learner, loader, learner.mesh
        self.run = run or Run.plain(learner.mesh, loader)
        self.callbacks: tuple[Callback, ...] = ()
        self._step_callbacks: tuple[Callback, ...] = ()
        self.check_every = check_every
        self.averages: Averages | None = None
        self._base = ""  # the digest of the weights that an adapter stands on
        self.progress, self.until, self.total_steps = Progress(), Length(0, "steps"), 0
        self.stopped: str | None = None
        self._requests = StopRequests(self.mesh)
        self._interrupted: str | None = None  # by whom
        self.differences: list[str] = []  # from one process's result; complete at the end
        self.empty_batches = 0  # in which no target counted, so that no update was made
        self.soundness = Soundness(self.run, loader)
        self.judge = Judge(guard or Guard(), scaled=learner.mixed.scale is not None)
        self._refusals = Refusals(self.judge, learner, loader, self.soundness)
        self._unsteady = ""  # why processors cannot be compared
        self._went_back = False  # to a checkpoint, in the last update
        self._unsaved = Unsaved()
        self._in_callbacks = False  # callbacks of a step, an epoch or the end are being called
        self._refused: Evaluation | None = None  # has numbers that are not finite: it ends the training
        self.meter = Meter(self.mesh)
        self.stragglers: Stragglers | None = None
        self.measurements = Measurements(learner, loader, self.run)
        for callback in callbacks:
            self.add(callback)

    def keep_averages(self, settings: Ema) -> None:
        """Keeps averages of the weights from now on: they begin as these are. Call it on every rank."""
        self.averages = Averages(self.learner, settings)

    def add(self, callback: Callback) -> None:
        """Adds a callback, which is called from the next moment on. Call it on every rank.

        Raises UsageError unless it is a Callback, and for a method that looks like a moment's but is never called.
        """
        refuse_overrides(callback)
        # At an epoch and at the end, callbacks that work (evaluate, save) come before those that write about it. At a
        # step, after them: metrics must be on disk before the checkpoint of the same step.
        self.callbacks = tuple(sorted([*self.callbacks, callback], key=lambda c: c.reads))
        # Metrics are read only if a callback overrides `step`.
        self._step_callbacks = tuple(c for c in reversed(self.callbacks) if is_overridden(c, "step"))

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
                self._call_failed(error)
                raise
            finally:
                self.measurements.drop()
                heartbeat.enter("end", "closing the loader")
                self.loader.close()
                release(self.run.folder)
        return self.progress

    def _train_to_the_end(self) -> None:
        self.stragglers = Stragglers(self.mesh, self._shares()) if self.mesh.ranks > 1 else None
        with StopRequests(self.mesh, self.run.max_time, stragglers=self.stragglers) as self._requests:
            self._refusals.begin(self.progress.step)
            consistency.compare_starts(self.progress.step, self.total_steps, self.callbacks, self.mesh)
            with changes_printed(self.learner, self.progress.step):
                self.tell_start()
            self.check("before the first update", states=True)
            self._train()
            if self._interrupted:
                self._interrupt(self._interrupted)
        heartbeat.enter("end", "the last checks")
        self.learner.sync_buffers()  # the caller gets the same model on every rank, saved or not
        self.check("at the end of the training")
        self.differences = self.learner.differences()
        moment = self._moment("end")
        for reads in (
            False,
            True,
        ):  # the last evaluation and checkpoint may fail: report a good end after them
            self._call("end", [c for c in self.callbacks if c.reads is reads], lambda c: c.end(moment))

    def _shares(self) -> list[int]:
        """The samples of a full batch that each rank computes."""
        axes, sampler = self.mesh.axes, self.loader.sampler
        of_dp_rank = [sampler.of_rank(dp_rank, axes.dp_size) for dp_rank in range(axes.dp_size)]
        return [of_dp_rank[axes.dp_rank(rank)] for rank in range(self.mesh.ranks)]

    def _interrupt(self, reason: str) -> NoReturn:
        """Lets the callbacks save, and raises StoppedError."""
        moment = self._moment("interrupted")
        self._call("interrupted", self.callbacks, lambda c: c.interrupted(moment))
        raise StoppedError(
            f"stopped by {reason} after step {self.progress.step} of {self.total_steps}: the training is not done."
        )

    def stop(self, reason: str) -> None:
        """Ends the training after the current update; `end` is still called. Call it on every rank."""
        self.stopped = reason

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample and calls `evaluated` of all callbacks. Collective.

        Raises UsageError without held-out data, and NotFiniteError, after the callbacks, if a number of the evaluation
        is NaN or infinite. When a callback called it, the error is raised after the other callbacks of that moment, so
        that weights that are finite can still be saved.
        """
        if self.run.test_loader is None:
            raise UsageError("this run has no held-out data to evaluate on: give Run(test_loader=…).")
        with heartbeat.within("evaluate"):
            self.learner.settle()
            evaluation = evaluate(self.learner, self.run.test_loader, self.mesh)
            if self.averages is not None:
                with self.averages.in_place():
                    averaged = evaluate(self.learner, self.run.test_loader, self.mesh)
                evaluation = evaluation.beside(EMA, averaged)
        moment = self._moment("evaluated")
        for callback in self.callbacks:
            with _at_work(callback, "evaluated"):
                callback.evaluated(moment, evaluation)
        if evaluation.not_finite:
            self._refused = evaluation
            if not self._in_callbacks:
                self._refuse_evaluation(evaluation)
        return evaluation

    def evaluation_names(self) -> set[str]:
        """The names that evaluations give numbers, from one held-out batch; none without held-out data. Collective."""
        if self.run.test_loader is None:
            return set()
        self.learner.settle()
        with heartbeat.within("evaluate"):
            names = names_of_numbers(self.learner, self.run.test_loader, self.mesh)
        return names | ({EMA + name for name in names} if self.averages is not None else set())

    def check(self, when: str, states: bool = False) -> None:
        """Raises NotFiniteError unless all weights are finite, DivergenceError unless replicas are equal bit by bit;
        with `states`, for optimizer states, too. Collective; the same error on every rank.

        The message names the tensor, its rank, the last good step and the checkpoint to go back to.
        """
        self.learner.settle()
        try:
            with self.learner.optimizer_states_on_device() if states else nullcontext():
                self.learner.check(when, state.optimizer_states(self.learner) if states else ())
        except (DivergenceError, NotFiniteError) as error:
            raise self.soundness.explained(error, self.progress.step) from None
        self.soundness.step = self.progress.step

    def snapshot(self, memory: HostMemory | None = None) -> Snapshot:
        """This rank's part of a checkpoint, after buffers are synchronised; copied into `memory` where that is given.
        Collective.

        Raises NotFiniteError or DivergenceError, as `check` does: bad weights are not saved.
        """
        self.learner.settle()
        self.learner.sync_buffers()
        step = self.progress.step
        self.check(f"before the checkpoint of step {step}, which was not written", states=True)
        if step:
            self._unsaved.print_new(self.learner)
        checks = Checks(agreed=True, finite=True, step=step)
        guard = self.judge.state()
        taken = state.snapshot(self.learner, self.progress, self.run, self.loader, guard, memory)
        if self.averages is not None:
            taken = state.with_averages(taken, self.averages, memory)
        if self.learner.base:
            self._base = self._base or state.digest_of_base(self.learner)
            taken = state.with_base(taken, self._base)
        return replace(taken, checks=checks)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint. In its own layout training continues bit by bit; in another, with the same global batches
        and the same counts."""
        self.learner.settle()
        self.progress, self.soundness.step = state.restore(checkpoint, self.learner, self.averages), None
        self.judge.load(checkpoint.state.get("guard"))

    def tell_start(self) -> None:
        """Calls `start` of all callbacks."""
        moment = self._moment("start")
        for callback in self.callbacks:
            with _at_work(callback, "start"):
                callback.start(moment)

    def tell_saved(
        self, path: Path, progress: Progress | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        """Calls `saved` of all callbacks, after the checkpoint of `progress` (now, by default) was written to `path`.
        Call it on every rank."""
        self.learner.settle()
        moment = replace(self._moment("saved", progress), numbers=numbers or {})
        for callback in self.callbacks:
            with _at_work(callback, "saved"):
                callback.saved(moment, path)

    def tell_save_failed(self, error: CheckpointError, progress: Progress | None = None) -> None:
        """Calls `save_failed` of all callbacks, after the checkpoint of `progress` could not be written. Call it on
        every rank."""
        self.learner.settle()
        moment = self._moment("save_failed", progress)
        for callback in self.callbacks:
            with _at_work(callback, "save_failed"):
                callback.save_failed(moment, error)

    def _moment(self, name: Name, progress: Progress | None = None) -> Moment:
        return Moment(name=name, progress=progress or self.progress, trainer=self)

    def _train(self) -> None:
        self.meter.read()
        self.measurements.plan(self.progress.step, self.total_steps)
        heartbeat.first = heartbeat.step = self.progress.step
        heartbeat.enter("data")
        self.learner.values_may_travel = True
        try:
            self._update_until_the_end()
        finally:
            self.learner.values_may_travel = False
            self.learner.settle()

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
        # Callbacks that read are called after the last update, too; the others, which evaluate or save, have `end`.
        last = step >= self.total_steps
        due = [c for c in self._step_callbacks if c.due_at_step(step) or (last and c.reads)]
        reads = any(callback.reads for callback in due)
        rate = self.learner.optimizer.get_lr() if reads else 0.0
        refusal, metrics = self._refusals.again(batch, step), None
        if refusal is not None:
            self.learner.leave_out()
        else:
            metrics = self._learn(batch, reads)
            if self.judge.why and metrics is not None:
                refusal = self._refusals.of(batch, step, metrics)
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
        """Counts an update that was made, or left out."""
        self.progress = self.progress.advance(batch.samples)
        if self.averages is not None:
            self.averages.update(self.progress.step)
        heartbeat.step = self.progress.step

    def _measure(self, step: int, batch: Batch) -> None:
        """Where it is due: begins to measure where the time of steps goes, or tells it. Collective."""
        if step != self.measurements.due:
            return
        self.learner.settle()
        with self.meter.paused():
            measured = self.measurements.after(step, batch)
        if measured is not None:
            moment = self._moment("measured")
            self._call("measured", self.callbacks, lambda c: c.measured(moment, measured))

    def _check_processors(self, batch: Batch, step: int) -> None:
        """Where it is due (guard.recompute): raises ProcessorError if ranks compute different gradients. Collective."""
        every = self.judge.guard.recompute
        if every is None or self._unsteady or not every.due_at_step(step):
            return
        self.learner.settle()
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
            raise blame.of_target(self.loader, batch.epoch, batch.index, error) from None

    def _go_back(self, refusal: Refusal) -> bool:
        """Restores the newest checkpoint; the batch is left out when it comes again. False if there is none: then the
        update is skipped. Collective."""
        moment = self._moment("rewinding")
        self._call("rewinding", self.callbacks, lambda c: c.rewinding(moment))
        with self.meter.paused(), heartbeat.within("checkpoint", "going back to the last one"):
            path = self._refusals.checkpoint_before(self.progress.step)
            if path is None:
                return False
            checkpoint, batch = load(path, self.mesh), (refusal.epoch, refusal.batch)
            self.learner.settle()
            restored = state.restore(checkpoint, self.learner, self.averages)
            self.progress, self.soundness.step = restored, None
            self.judge.go_back(checkpoint.state.get("guard"), batch)
        heartbeat.step = self.progress.step
        self.measurements.drop()
        self._requests.went_back()
        self._tell_refused(refusal, back_to=self.progress.step)
        heartbeat.enter("data")
        return True

    def _tell_refused(self, refusal: Refusal, back_to: int | None = None) -> None:
        """Says it on the screen, and calls `refused` of all callbacks."""
        self._refusals.say(refusal, back_to)
        if back_to is None and refusal.action == "rewind":
            refusal = replace(refusal, action="skip")
        moment = self._moment("refused")
        self._call("refused", self.callbacks, lambda c: c.refused(moment, refusal))

    def _print_empty(self, batch: Batch) -> None:
        """A line for the first, tenth, hundredth and thousandth batch without an update: it may be a mistake."""
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
            self.soundness.refuse_loss(metrics["loss"], self.progress.step)
        # With a loss scale, an update whose gradients overflow is skipped instead.
        if not math.isfinite(metrics["gradient_norm"]) and scale is None:
            faulty = self.learner.faulty_gradients
            self.soundness.refuse_gradients(metrics["gradient_norm"], faulty, self.progress.step)
        numbers = {**metrics, "lr": rate, **self.meter.read(batch)}
        if self.stragglers is not None and (slowest := self.stragglers.slowest) is not None:
            numbers |= {"slowest_rank": float(slowest.rank), "slowest_times_others": slowest.times}
        return numbers | ({"loss_scale": scale.scale} if scale else {})

    def _call_epoch(self) -> None:
        moment = self._moment("epoch")
        due = [callback for callback in self.callbacks if callback.due_at_epoch(self.progress.epoch)]
        self._call("epoch", due, lambda c: c.epoch(moment))

    def _call(self, name: Name, callbacks: Sequence[Callback], call: Callable[[Callback], None]) -> None:
        """Calls these callbacks. Then raises NotFiniteError if an evaluation of theirs was not finite."""
        self._in_callbacks = True
        try:
            for callback in callbacks:
                if callback.weights or name != "step":
                    self.learner.settle()
                with (
                    nullcontext() if name == "step" and callback.reads else self.meter.paused(),
                    _at_work(callback, name),
                ):
                    call(callback)
        finally:
            self._in_callbacks = False
        if self._refused is not None:
            self._refuse_evaluation(self._refused)

    def _refuse_evaluation(self, evaluation: Evaluation) -> NoReturn:
        """Raises NotFiniteError for an evaluation that is not finite: names bad weights or, if there are none, the bad
        sample."""
        when = f"the evaluation after step {self.progress.step}"
        self.check(f"by {when}")
        self.soundness.refuse_evaluation(evaluation, when)

    def _call_failed(self, error: BaseException) -> None:
        """Calls `failed` of all callbacks, which close their files. An error there must not hide the first."""
        moment = self._moment("failed")
        for callback in self.callbacks:
            try:
                callback.failed(moment, error)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if sys.version_info >= (3, 11):
                    error.add_note(f"({type(callback).__name__} failed too: {second})")


def _at_work(callback: Callback, name: Name) -> AbstractContextManager[None]:
    """Around a callback's work: in the heartbeat it is the callback's, «Evaluate.epoch»."""
    return heartbeat.within("callbacks", f"{type(callback).__name__}.{name}")
