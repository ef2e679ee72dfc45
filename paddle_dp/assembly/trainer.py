"""The trainer: fits a learner on a loader's batches, and calls the callbacks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NoReturn

from paddle.optimizer import lr

from paddle_dp.assembly.script import trainer_of
from paddle_dp.core.consistency import CONTINUED
from paddle_dp.core.optimizer import without_clips
from paddle_dp.core.plateau import Plateau
from paddle_dp.data import Loader
from paddle_dp.errors import StoppedError, UsageError
from paddle_dp.identity import consistency
from paddle_dp.identity.same_run import rates_of
from paddle_dp.identity.unsaved import changes_printed
from paddle_dp.learner import Learner
from paddle_dp.learner.update import PlacedNorm
from paddle_dp.mesh.heartbeat import heartbeat, on_board
from paddle_dp.recipe import Guard
from paddle_dp.recipe.folder import release
from paddle_dp.train.callback import Callback, Progress
from paddle_dp.train.measurements import Measurements
from paddle_dp.train.refusals import Refusals
from paddle_dp.train.rounds import RoundDriver
from paddle_dp.train.run import Run
from paddle_dp.train.steps import (
    CallbackHook,
    GuardHook,
    PlateauHook,
    ProgressHook,
    SpeedHook,
    StepDriver,
    StepHook,
    StopHook,
    WeightsHook,
)
from paddle_dp.train.stopping import LOST_FOLDER, RunFolder, StopRequests, end_interrupted, lost
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Every, Length


class Trainer(TrainingState):
    """Trains a learner on a loader's batches.

        Trainer.of(model=model, loss=loss, optimizer="adamw", train=dataset, batch=64, length="3 epochs").fit()
        Trainer(learner, loader, callbacks).fit("3 epochs")

    The first builds strategy, loaders and learner as for a recipe; the second takes a placed learner.
    `run` has the folder and the held-out data; `check_every`: how often the ranks compare weights; `guard`: how to
    handle an update with wrong numbers. Nothing here depends on the layout: the learner was placed before.
    """

    of = classmethod(trainer_of)  # type: ignore[var-annotated]

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
        self._folder = RunFolder(self.run.folder) if self.mesh.is_main else None
        self._refusals = Refusals(self)
        self.measurements = Measurements(self)
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
        until = until if isinstance(until, Length) else Length.parse(until)
        self.total_steps, self.early_end, self.interrupted = self.loader.sampler.updates(until), None, None
        lines = [schedule_line(self.learner.rate.schedule, self.total_steps, self.loader.batches)]
        lines += [self.learner.micro_batches_line(self.loader.sampler.micro_batches)]
        for line in filter(None, lines if self.mesh.is_main else ()):
            print(line, file=sys.stderr)
        requests = StopRequests(self.mesh, self.run.max_time, folder=self._folder)
        norm = self.learner.mode.norm
        clips = norm.clips if isinstance(norm, PlacedNorm) else norm.clips or None
        unclipped = without_clips(self.learner.optimizer, clips)
        with on_board(), closing(requests), unclipped:
            try:
                self._train_to_the_end(requests)
            except BaseException as error:
                self.callbacks.tell_failed(self.moment("failed"), error)
                raise
            finally:
                self.measurements.drop()
                heartbeat.enter("end", "closing the loader")
                self.loader.close()
                release(self.run.folder)
        return self.progress

    def _train_to_the_end(self, requests: StopRequests) -> None:
        synchronous = self.learner.async_rank is None
        requests.stragglers = self.measurements.compare_ranks()
        with requests:
            self.learner.statistics.restore_norms()
            self._refusals.begin(self.progress.step)
            scores = [name for metric in self.run.metrics for name in metric.names]
            consistency.compare_starts(
                self.progress.step, self.total_steps, self.callbacks, scores, self.mesh
            )
            self.tell_refuse()
            self.refuse_schedule()
            if self.run.metrics and self.run.test_loader is not None:
                self.evaluation_names()  # refuses metrics that do not fit the first held-out samples
            self.begin_run()
            if self._folder is not None:
                self._folder.begin()
            with changes_printed(self.learner, self.progress.step):
                self.tell_start()
            self.check("before the first update", states=True, cause=CONTINUED)
            if synchronous:
                self.measurements.plan(self.progress.step, self.total_steps)
            self.drive(requests)
            if self.interrupted:
                self._interrupt(self.interrupted)
        heartbeat.enter("end", "the last checks")
        if self.early_end and self.progress.step < self.total_steps:
            # A rank that alone has called it would answer the others' next exchange.
            self.mesh.wait("trainer.stop on every rank")
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

        def noted(callbacks: Iterable[Callback]) -> Iterator[Callback]:
            for callback in callbacks:
                yield callback
                ended.append(callback)

        # A signal may end an evaluation, and it may fail: the last updates are saved right before the first one.
        # Both may fail: success is reported after them.
        in_order = [*self.callbacks]
        evaluations = [
            number for number, callback in enumerate(in_order) if callback.evaluates_at_end is True
        ]
        for first in evaluations[:1]:
            in_order[first:] = sorted(
                in_order[first:], key=lambda callback: callback.saves_at_end is not True
            )
        for reads in (False, True):
            self.call(self.moment("end"), noted(c for c in in_order if c.reads is reads))

    def _interrupt(self, reason: str) -> NoReturn:
        """Lets the callbacks save, and raises StoppedError."""
        self.call(self.moment("interrupted"), self.callbacks)
        if reason == LOST_FOLDER:
            raise lost(self.run.folder, self.progress.step)
        raise StoppedError(
            f"stopped by {reason} after step {self.progress.step} of {self.total_steps}: the training is not done."
        )

    def drive(self, requests: StopRequests | None = None) -> None:
        """Trains from the current progress to `total_steps`, and nothing else: `fit` calls it. Collective."""
        self.meter.read()
        heartbeat.first = heartbeat.step = self.progress.step
        heartbeat.enter("data")
        requests = requests or StopRequests(self.mesh)
        requests.start = time.monotonic() - heartbeat.born
        self._driver(requests).run()

    def _driver(self, requests: StopRequests) -> StepDriver | RoundDriver:
        if self.learner.async_rank is not None:
            return RoundDriver(self, self.learner.async_rank, requests, self.check_every)
        hooks: list[StepHook] = [
            ProgressHook(self),
            SpeedHook(self),
            CallbackHook(self, self._refusals, self.measurements.slowest_numbers),
            StopHook(self, requests),
            *self.measurements.hooks(),
        ]
        if self.judge.judges or self.judge.left_out:  # a resumed run may skip batches that it has refused
            hooks.append(GuardHook(self, self._refusals))
        if self.check_every is not None:
            hooks.append(WeightsHook(self, self.check_every))
        if self.plateau is not None:
            hooks.append(PlateauHook(self, self.plateau))
        return StepDriver(self, hooks)


# Attributes of Paddle's schedulers that say after how many calls of `step` a change comes.
_SPANS = ("T_max", "T_0", "step_size", "milestones", "boundaries", "decay_steps", "total_steps")


def schedule_line(schedule: Any, steps: int, steps_per_epoch: int) -> str:
    """A line on a scheduler that a user has given: loops often step one after every epoch, and here it is stepped after
    every update, so its rate may swing, or be over within the first epoch. "" for the schedules of the shelf."""
    function = getattr(schedule, "lr_lambda", None)
    shelf = (getattr(function, "__module__", None) or "").startswith("paddle_dp.schedules")
    shelf = shelf or isinstance(schedule, Plateau)
    if shelf or not isinstance(schedule, lr.LRScheduler) or steps_per_epoch < 2 or steps < 2:
        return ""
    points = rates_of(schedule, [0, min(steps_per_epoch, steps - 1), steps - 1])
    names = ("at first", "after an epoch", "at the end")
    rates = ", ".join(f"{rate:.3g} {name}" for (_, rate), name in zip(points, names, strict=False))
    spans = {
        name: value for name in _SPANS if isinstance(value := getattr(schedule, name, None), (int, list))
    }
    counts = ", ".join(f"{name}={value}" for name, value in spans.items())
    hint = f" If {counts} counts epochs, multiply by {steps_per_epoch}." if counts else ""
    often = f"{type(schedule).__name__} steps after every update, {steps_per_epoch} times an epoch"
    return f"{often}{rates and ': '}{rates}.{hint}"
