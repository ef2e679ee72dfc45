"""The training loop: feeds the learner global batches, counts the progress, tells the callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from paddle_dp.checkpoint import Checkpoint, Checks, Snapshot
from paddle_dp.data import Batch, Loader
from paddle_dp.errors import DivergenceError, NotFiniteError, TargetError, UsageError
from paddle_dp.parallel import Learner
from paddle_dp.train import blame, consistency, state
from paddle_dp.train.callback import Callback, Moment, Name
from paddle_dp.train.evaluate import evaluate
from paddle_dp.train.evaluation import Evaluation
from paddle_dp.train.meter import Meter
from paddle_dp.train.overrides import is_overridden, refuse_overrides
from paddle_dp.train.progress import Progress
from paddle_dp.train.run import Run
from paddle_dp.train.sound import Soundness
from paddle_dp.units import Every, Length


class TrainingLoop:
    """Trains a learner on a loader's batches; `Trainer` is this one, with a way to be made from a script.

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
        self.callbacks: tuple[Callback, ...] = ()
        self._hear_steps: tuple[Callback, ...] = ()
        self.check_every = check_every
        self.progress, self.until, self.total_steps = Progress(), Length(0, "steps"), 0
        self.stopped: str | None = None
        self.differences: list[str] = []  # from what one process learns; known at the end
        self.empty_batches = 0  # of which nothing was learned, for nothing in them counted
        self.soundness = Soundness(self.run, loader)
        self._said_lost = False
        self._telling = False  # callbacks are being told of a step, an epoch or the end
        self._refused: Evaluation | None = None  # its numbers were none: it ends the training
        self.meter = Meter(self.mesh)
        for callback in callbacks:
            self.add(callback)

    def add(self, callback: Callback) -> None:
        """Takes one more callback, from the next moment on. To be called on every rank alike.

        Raises UsageError for what is no Callback, and for a method that looks like a moment and is none.
        """
        refuse_overrides(callback)
        # An epoch and the end are told to those that work (evaluate, save) before those that write about it. A step,
        # the other way round: metrics must be on disk before the checkpoint that contains them.
        self.callbacks = tuple(sorted([*self.callbacks, callback], key=lambda c: c.reads))
        # Numbers are read for those alone that do something at a step.
        self._hear_steps = tuple(c for c in reversed(self.callbacks) if is_overridden(c, "step"))

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
            consistency.compare_starts(self.progress.step, self.total_steps, self.callbacks, self.mesh)
            self.tell_start()
            self.check("before the first update", states=True)
            self._train()
            # Whoever takes the model from here has the same one on every rank, whether it was saved or not.
            self.learner.sync_buffers()
            self.check("at the end of the training")
            self.differences = self.learner.differences()
            moment = self._moment("end")
            for reads in (False, True):  # nobody writes of a good end before those that work have had theirs
                self._tell_due([c for c in self.callbacks if c.reads is reads], lambda c: c.end(moment))
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
        moment = self._moment("evaluated")
        for callback in self.callbacks:
            callback.evaluated(moment, found)
        if found.not_finite:
            self._refused = found
            if not self._telling:
                self._refuse_evaluation(found)
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
            raise self.soundness.explained(error, self.progress.step) from None
        self.soundness.step = self.progress.step

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
        self.progress, self.soundness.step = state.restore(checkpoint, self.learner), None

    def tell_start(self) -> None:
        """Tells all callbacks that updates are about to begin."""
        moment = self._moment("start")
        for callback in self.callbacks:
            callback.start(moment)

    def tell_saved(self, path: Path) -> None:
        """Tells all callbacks that a checkpoint was written to `path`. To be called on every rank."""
        moment = self._moment("saved")
        for callback in self.callbacks:
            callback.saved(moment, path)

    def _moment(self, name: Name) -> Moment:
        return Moment(name=name, progress=self.progress, trainer=self)

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
        due = [callback for callback in self._hear_steps if callback.due_at_step(step)]
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
            self._tell_due(due, lambda c: c.step(moment), is_step=True)

    def _learn(self, batch: Batch, collect_metrics: bool) -> dict[str, float] | None:
        try:
            return self.learner.train_batch(batch, collect_metrics)
        except NotFiniteError as error:
            raise self.soundness.explained(error, self.progress.step) from None
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
        if (names := self.learner.lost_of_optimizer()) and self.mesh.is_main:
            print(
                f"optimizer {type(self.learner.optimizer).__name__}: its attribute{'s' * (len(names) > 1)} "
                f"{', '.join(names)} changed in training, and not in its state_dict, so a resumed run goes on with "
                "what the optimizer was made with. Keep it in an accumulator, which is saved: "
                "self._add_accumulator(name, parameter).",
                file=sys.stderr,
                flush=True,
            )

    def _numbers(self, metrics: dict[str, float], rate: float, batch: Batch) -> dict[str, float]:
        """The update just done: its metrics, its rate and how fast it goes. Raises NotFiniteError when the loss or the
        gradient norm is not finite; on every rank, since metrics are global.
        """
        scale = self.learner.mixed.scale
        if not math.isfinite(metrics["loss"]) and not self.learner.empty:
            self.soundness.refuse_loss(metrics["loss"], self.progress.step)
        # With a loss scale, an update whose gradients had overflowed was left out.
        if not math.isfinite(metrics["gradient_norm"]) and scale is None:
            faulty = self.learner.faulty_gradients
            self.soundness.refuse_gradients(metrics["gradient_norm"], faulty, self.progress.step)
        numbers = {**metrics, "lr": rate, **self.meter.read(batch)}
        return numbers | ({"loss_scale": scale.scale} if scale else {})

    def _tell_epoch(self) -> None:
        moment = self._moment("epoch")
        due = [callback for callback in self.callbacks if callback.due_at_epoch(self.progress.epoch)]
        self._tell_due(due, lambda c: c.epoch(moment))

    def _tell_due(
        self, callbacks: Sequence[Callback], tell: Callable[[Callback], None], is_step: bool = False
    ) -> None:
        """Tells these callbacks; then an evaluation of theirs whose numbers are none ends the training."""
        self._telling = True
        try:
            for callback in callbacks:
                with nullcontext() if is_step and callback.reads else self.meter.paused():
                    tell(callback)
        finally:
            self._telling = False
        if self._refused is not None:
            self._refuse_evaluation(self._refused)

    def _refuse_evaluation(self, found: Evaluation) -> NoReturn:
        """Raises NotFiniteError for an evaluation with numbers that are none: the weights are to blame, or its data."""
        when = f"the evaluation after step {self.progress.step}"
        self.check(f"by {when}")
        self.soundness.refuse_evaluation(found, when)

    def _tell_failed(self, error: BaseException) -> None:
        """Lets callbacks close their files; a second failure there must not hide the first."""
        moment = self._moment("failed")
        for callback in self.callbacks:
            try:
                callback.failed(moment, error)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if sys.version_info >= (3, 11):
                    error.add_note(f"({type(callback).__name__} failed too: {second})")
