"""The sentence: feed the learner batches, count the progress, tell the callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from paddle_dp.checkpoint import Checkpoint, Checks, Snapshot
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import DivergenceError, NotFiniteError, TargetError, UsageError
from paddle_dp.parallel import Learner
from paddle_dp.train import blame, consistency, sound, state
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.evaluate import evaluate
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import Meter
from paddle_dp.train.overrides import refuse_overrides
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
        for callback in callbacks:
            refuse_overrides(callback)
        # An epoch and the end are told to those that work (evaluate, save) before those that write about it. A step,
        # the other way round: what a checkpoint holds must be written down when the process dies right behind it.
        self.callbacks, self.check_every = tuple(sorted(callbacks, key=lambda c: c.reads)), check_every
        self.progress, self.until, self.total_steps = Progress(), Length(0, "steps"), 0
        self.stopped: str | None = None
        self.differences: list[str] = []  # from what one process learns; known at the end
        self.empty_batches = 0  # of which nothing was learned, for nothing in them counted
        self.sound: int | None = None  # the last step after which the weights were looked at, and were good
        self._said_lost = False
        self._telling = False  # callbacks are being told of a step, an epoch or the end
        self._refused: Evaluation | None = None  # its numbers were none: it ends the training
        self.meter = Meter(self.mesh)
        self._steppers = [c for c in reversed(self.callbacks) if _own_step(c)]

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
            consistency.compare_starts(self)
            self.tell("start")
            self.check("before the first update", states=True)
            self._train()
            # Whoever takes the model from here has the same one on every rank, whether it was saved or not.
            self.learner.sync_buffers()
            self.check("at the end of the training")
            self.differences = self.learner.differences()
            moment = Moment(name="end", progress=self.progress, trainer=self)
            for reads in (False, True):  # nobody writes of a good end before those that work have had theirs
                self._tell_due("end", [c for c in self.callbacks if c.reads is reads], moment)
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

        Raises UsageError when the run has nothing held out, NotFiniteError, once they have heard of it, when a number
        of the evaluation is NaN or infinite. Within a training, that ends it when the callbacks of the moment are done:
        weights that are good can still be saved.
        """
        if self.run.test_loader is None:
            raise UsageError("this run has no held-out data to evaluate on: give Run(test_loader=…).")
        found = evaluate(self.learner, self.run.test_loader, self.mesh)
        self.tell("evaluated", found.numbers, found)
        if found.not_finite:
            self._refused = found
            if not self._telling:
                sound.refuse_evaluation(found, self)
        return found

    def check(self, when: str, states: bool = False) -> None:
        """Raises NotFiniteError unless all weights are finite, DivergenceError unless ranks that hold the same weights
        hold the same bits; with `states`, so for the optimizer's states. Collective, and the same error on every rank.

        The message says which tensor, on which rank, until when all was good, and which checkpoint to go back to.
        """
        try:
            with self.learner.optimizer_states_on_device() if states else nullcontext():
                self.learner.check(when, state.optimizer_states(self.learner) if states else ())
        except (DivergenceError, NotFiniteError) as error:
            raise sound.explained(error, self) from None
        self.sound = self.progress.step

    def snapshot(self) -> Snapshot:
        """What this rank brings to a checkpoint. Collective: running statistics meet first.

        Raises NotFiniteError or DivergenceError, as `check` does, instead of handing over what is not good.
        """
        self.learner.sync_buffers()
        step = self.progress.step
        self.check(f"before the checkpoint of step {step}, which was not written", states=True)
        self._say_lost()
        checks = Checks(agreed=True, finite=True, step=step)
        return state.snapshot(self.learner, self.progress, self.run, self.loader, checks)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint: bitwise on as many ranks as saved it, exactly counted on any other number."""
        self.progress, self.sound = state.restore(checkpoint, self.learner), None

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
        reads = any(callback.reads for callback in due)
        rate = self.learner.optimizer.get_lr() if reads else 0.0
        metrics = self._learn(batch, reads)
        self.progress = self.progress.advance(batch.samples)
        if self.learner.empty:
            self._say_empty(batch)
        self.meter.add(batch.samples, batch.waited)
        if self.check_every is not None and self.check_every.due_at_step(step):
            self.check(f"after step {step}")
        if due:
            numbers = {} if metrics is None else self._numbers(metrics, rate, batch)
            moment = Moment(name="step", progress=self.progress, trainer=self, numbers=numbers)
            self._tell_due("step", due, moment)

    def _learn(self, batch: Batch, collect_metrics: bool) -> dict[str, float] | None:
        try:
            return self.learner.train_batch(batch, collect_metrics)
        except NotFiniteError as error:
            raise sound.explained(error, self) from None
        except TargetError as error:
            raise blame.of_target(self.loader, batch.epoch, batch.index, error) from None

    def _say_empty(self, batch: Batch) -> None:
        """A line for the first, the tenth, the hundredth batch of which nothing was learned: it may be a slip."""
        self.empty_batches += 1
        if self.mesh.is_main and self.empty_batches in (1, 10, 100, 1000):
            often = f" ({self.empty_batches} batches so far)" if self.empty_batches > 1 else ""
            print(
                f"step {self.progress.step}: not one target of this global batch of {batch.samples} samples counts, so "
                f"no update was made from it{often}. Look at the data, and at what the loss leaves out "
                "(loss.ignore_index).",
                file=sys.stderr,
                flush=True,
            )

    def _say_lost(self) -> None:
        """A line, once, for what forward keeps and no checkpoint holds. Collective."""
        if self._said_lost or not self.progress.step:
            return
        self._said_lost = True
        if (names := self.learner.lost()) and self.mesh.is_main:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(
                f"buffer {names[0]}{more}: changed in training, and not in the checkpoint, so a resumed run goes on "
                "with what the model was made with. If later batches read it, make it with "
                "register_buffer(name, tensor); a tensor that is assigned to a layer's attribute, or made with "
                "persistable=False, is not saved.",
                file=sys.stderr,
                flush=True,
            )

    def _numbers(self, metrics: dict[str, float], rate: float, batch: Batch) -> dict[str, float]:
        """The update just done: its metrics, its rate and how fast it goes. Raises NotFiniteError when the loss or the
        gradient norm is not finite; on every rank, since metrics are global.
        """
        scale = self.learner.mixed.scale
        if not math.isfinite(metrics["loss"]) and not self.learner.empty:
            sound.refuse_loss(metrics["loss"], self)
        # With a loss scale, an update whose gradients had overflowed was left out.
        if not math.isfinite(metrics["gradient_norm"]) and scale is None:
            sound.refuse_gradients(metrics["gradient_norm"], self)
        numbers = {**metrics, "lr": rate, **self.meter.read(batch)}
        return numbers | ({"loss_scale": scale.scale} if scale else {})

    def _tell_epoch(self) -> None:
        moment = Moment(name="epoch", progress=self.progress, trainer=self)
        due = [callback for callback in self.callbacks if callback.due_at_epoch(self.progress.epoch)]
        self._tell_due("epoch", due, moment)

    def _tell_due(self, name: str, callbacks: Sequence[Callback], moment: Moment) -> None:
        """Tells these callbacks; then an evaluation of theirs whose numbers are none ends the training."""
        self._telling = True
        try:
            for callback in callbacks:
                with self.meter.paused() if name != "step" or not callback.reads else nullcontext():
                    getattr(callback, name)(moment)
        finally:
            self._telling = False
        if self._refused is not None:
            sound.refuse_evaluation(self._refused, self)

    def _tell_failed(self, error: BaseException) -> None:
        """Lets callbacks close their files; a second failure there must not hide the first."""
        moment = Moment(name="failed", progress=self.progress, trainer=self, detail=error)
        for callback in self.callbacks:
            try:
                callback.failed(moment)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if hasattr(error, "add_note"):  # Python 3.11 on
                    error.add_note(f"({type(callback).__name__} failed too: {second})")


def _own_step(callback: Callback) -> bool:
    """Whether it does anything at a step: in its class, or by a function that was given to the object."""
    return getattr(callback.step, "__func__", None) is not Callback.step
