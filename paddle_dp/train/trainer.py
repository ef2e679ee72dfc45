"""The sentence: feed the learner batches, count the progress, tell the callbacks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from paddle_dp.checkpoint import Checkpoint, Snapshot
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import LossError, UsageError
from paddle_dp.parallel import Learner
from paddle_dp.train import state
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.evaluate import evaluate
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import Meter
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run
from paddle_dp.train.script import FromPython
from paddle_dp.units import Every, Length


class Trainer(FromPython):
    """Trains a learner on a loader's batches.

        Trainer(learner, loader, callbacks).fit("3 epochs")

    `run` says where the run lives and what it is evaluated on; `check_every`, how often the ranks compare weights.
    No line here asks which layout it trains: that was decided when the learner was placed.
    """

    def __init__(
        self,
        learner: Learner,
        loader: Loader,
        callbacks: Sequence[Callback] = (),
        *,
        run: Run | None = None,
        check_every: Every | None = None,
    ):
        self.learner, self.loader, self.mesh = learner, loader, learner.mesh
        self.run = run or Run.plain(learner.mesh, loader)
        # An epoch and the end are told to those that work (evaluate, save) before those that write about it. A step,
        # the other way round: what a checkpoint holds must be written down when the process dies right behind it.
        self.callbacks, self.check_every = tuple(sorted(callbacks, key=lambda c: c.reads)), check_every
        self.progress, self.until, self.total_steps = Progress(), Length(0, "steps"), 0
        self.stopped: str | None = None
        self.meter = Meter(self.mesh)
        self._steppers = [c for c in reversed(self.callbacks) if type(c).step is not Callback.step]

    def fit(self, until: Length | str | None = None) -> Progress:
        """Trains from where it is until `until`, counted from the very beginning, and returns the progress.

        `until` may be left out where the run was made with a length. Whatever ends it early is told to the callbacks
        as `failed` and raised.
        """
        if until is None and not self.run.total_steps:
            raise UsageError('fit: say how long, as in fit("3 epochs"), or give the run a length.')
        until = Length(self.run.total_steps, "steps") if until is None else until
        self.until = until if isinstance(until, Length) else Length.parse(until)
        self.total_steps = self.until.steps(self.loader.batches)
        try:
            self.tell("start")
            self._train()
            self.learner.check("at the end of the training")
            self.tell("end")
        except BaseException as error:
            self._tell_failed(error)
            raise
        finally:
            self.loader.close()
        return self.progress

    def stop(self, reason: str) -> None:
        """Ends the training after the current update, in good order. To be called on every rank alike."""
        self.stopped = reason

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample and tells the callbacks. Collective.

        Raises UsageError when the run has nothing held out.
        """
        if self.run.test_loader is None:
            raise UsageError("this run has no held-out data to evaluate on: give Run(test_loader=…).")
        found = evaluate(self.learner, self.run.test_loader, self.mesh)
        self.tell("evaluated", found.numbers, found)
        return found

    def snapshot(self) -> Snapshot:
        """What this rank brings to a checkpoint. Collective: running statistics meet first."""
        return state.snapshot(self.learner, self.progress, self.run, self.loader)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint: bitwise on as many ranks as saved it, exactly counted on any other number."""
        self.progress = state.restore(checkpoint, self.learner)

    def tell(self, name: str, numbers: Any = None, detail: Any = None) -> None:
        """Tells every callback of a moment."""
        moment = Moment(name=name, progress=self.progress, trainer=self, numbers=numbers or {}, detail=detail)
        for callback in self.callbacks:
            getattr(callback, name)(moment)

    def _train(self) -> None:
        self.meter.read()
        while self.progress.step < self.total_steps and not self.stopped:
            for batch in self.loader.read(self.progress.epoch, self.progress.batch):
                self._update(batch)
                if self.stopped or self.progress.step >= self.total_steps:
                    break
            if self.progress.batch >= self.loader.batches:
                self.progress = self.progress.next_epoch()
                self._tell_epoch()

    def _update(self, batch: Batch) -> None:
        step = self.progress.step + 1
        due = [callback for callback in self._steppers if callback.due_at_step(step)]
        observe = any(callback.reads for callback in due)
        rate = self.learner.optimizer.get_lr() if observe else 0.0
        self.learner.train_batch(batch, observe)
        self.progress = self.progress.advance(batch.samples)
        self.meter.add(batch.samples, batch.waited)
        if self.check_every is not None and self.check_every.due_at_step(step):
            self.learner.check(f"after step {step}")
        if due:
            numbers = self._numbers(rate, batch) if observe else {}
            moment = Moment(name="step", progress=self.progress, trainer=self, numbers=numbers)
            for callback in due:
                with nullcontext() if callback.reads else self.meter.paused():
                    callback.step(moment)

    def _numbers(self, rate: float, batch: Batch) -> dict[str, float]:
        """The update just done, in global numbers. Collective. Raises LossError when the loss is not finite."""
        seen = dict(self.learner.observed)
        norm = seen.pop("gradient_norm")
        numbers = dict(zip(seen, self.mesh.sum(list(seen.values())), strict=True))
        scale = self.learner.mixed.scale
        if not math.isfinite(numbers["loss"]):
            raise LossError(
                f"the loss is {numbers['loss']} at step {self.progress.step}: training cannot go on from here. A lower "
                "schedule.peak, a longer schedule.warmup or optimizer.clip usually helps; --resume goes back to the "
                "newest checkpoint."
            )
        numbers |= {"lr": rate, "gradient_norm": norm, **self.meter.read(batch)}
        return numbers | ({"loss_scale": scale.scale} if scale else {})

    def _tell_epoch(self) -> None:
        moment = Moment(name="epoch", progress=self.progress, trainer=self)
        with self.meter.paused():
            for callback in self.callbacks:
                if callback.due_at_epoch(self.progress.epoch):
                    callback.epoch(moment)

    def _tell_failed(self, error: BaseException) -> None:
        """Lets callbacks close their files; a second failure there must not hide the first."""
        moment = Moment(name="failed", progress=self.progress, trainer=self, detail=error)
        for callback in self.callbacks:
            try:
                callback.failed(moment)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if hasattr(error, "add_note"):  # Python 3.11 on
                    error.add_note(f"({type(callback).__name__} failed too: {second})")
