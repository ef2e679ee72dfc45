"""The state of a training: callbacks see it, and it is checked, saved and restored as one."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from paddle_dp.checkpoint import Checkpoint, Checks, HostMemory, Snapshot
from paddle_dp.checks.layer_settings import LayerSettings
from paddle_dp.core.consistency import CHANGED
from paddle_dp.core.plateau import Plateau
from paddle_dp.core.precision import NOTHING
from paddle_dp.data import Loader
from paddle_dp.errors import CheckpointError, DivergenceError, NotFiniteError, UsageError, message_of
from paddle_dp.identity.unsaved import Unsaved
from paddle_dp.identity.walk import checksum
from paddle_dp.learner import Learner
from paddle_dp.learner.ema import Averages
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.recipe import Ema, Guard
from paddle_dp.train import state
from paddle_dp.train.blame import NumericsCheck
from paddle_dp.train.callback import Callback, Moment, Name, Progress
from paddle_dp.train.evaluate import evaluate, names_of_numbers
from paddle_dp.train.evaluation import EMA, Evaluation, unknown_number
from paddle_dp.train.gallery import Gallery
from paddle_dp.train.judge import LossGuard
from paddle_dp.train.meter import Meter
from paddle_dp.train.overrides import is_overridden, refuse_overrides
from paddle_dp.train.run import Run

_starts = Counter[Path]()  # of the trainings of this process, by folder

# The callbacks of a training, and how they are called -----------------------------------------------------------------


class CallbackList:
    """The callbacks of a training of `learner`; `meter` excludes the time of those that are no part of training.

    `at_work`: whether callbacks of a step, an epoch or the end are being called.
    """

    def __init__(self, learner: Learner, meter: Meter):
        self._learner, self._meter = learner, meter
        self._all: tuple[Callback, ...] = ()
        self._step_callbacks: tuple[Callback, ...] = ()
        self.at_work = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def add(self, callback: Callback) -> None:
        """Adds a callback. Raises UsageError unless it is a Callback, and for a method that looks like a moment's and
        is none."""
        refuse_overrides(callback)
        # At an epoch and at the end, callbacks that work (evaluate, save) precede those that report it. At a step they
        # follow them: metrics must be on disk before the checkpoint of the same step.
        self._all = tuple(sorted([*self._all, callback], key=lambda c: c.reads))
        # Metrics are read only if a callback overrides `step`.
        self._step_callbacks = tuple(c for c in reversed(self._all) if is_overridden(c, "step"))

    def due_at_step(self, step: int, last: bool) -> list[Callback]:
        """The callbacks that are due after update `step`. Callbacks that read are due after the `last` one, too; the
        others, which evaluate or save, have `end`."""
        return [c for c in self._step_callbacks if c.due_at_step(step) or (last and c.reads)]

    def due_at_epoch(self, epochs: int) -> list[Callback]:
        return [callback for callback in self._all if callback.due_at_epoch(epochs)]

    def call(self, moment: Moment, callbacks: Iterable[Callback], *subject: Any) -> None:
        """Calls the moment's method of these callbacks, with its `subject` if it has one, while the training stands
        still. Their time does not count, except `step` of callbacks that read."""
        self.at_work, name = True, moment.name
        try:
            for callback in callbacks:
                if callback.weights or name != "step":
                    self._learner.weights.wait()
                with (
                    NOTHING if name == "step" and callback.reads else self._meter.paused(),
                    _within(callback, name),
                ):
                    getattr(callback, name)(moment, *subject)
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            self.at_work = False
        self._learner.drop_gradients()

    def tell(self, moment: Moment, *subject: Any) -> None:
        """Calls the moment's method of all callbacks, within another one's work or before any."""
        try:
            for callback in self._all:
                with _within(callback, moment.name):
                    getattr(callback, moment.name)(moment, *subject)
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raises another error for Paddle's, if it comes from weights that this rank does not have."""
        if (explained := self._learner.weights.explain(error)) is not None:
            raise explained from error

    def tell_failed(self, moment: Moment, error: BaseException) -> None:
        """Calls `failed` of all callbacks, which close their files. An error there must not hide the first."""
        for callback in self._all:
            try:
                callback.failed(moment, error)
            except Exception as second:  # noqa: BLE001 - a callback may raise anything, and the first error matters
                if sys.version_info >= (3, 11):
                    error.add_note(f"({type(callback).__name__} failed too: {message_of(second)})")


def _within(callback: Callback, name: Name) -> AbstractContextManager[None]:
    """Marks time in the heartbeat as this callback's work, "Evaluate.epoch"."""
    return heartbeat.within("callbacks", f"{type(callback).__name__}.{name}")


class TrainingState:
    """A training as callbacks and drivers see it (`callback.Training`): learner, loader, progress, callbacks, judge and
    averages, and the methods that check, evaluate, save, restore and call the callbacks.

    `early_end`: the reason given to `stop`, with which a training is done; `interrupted`: the reason, such as a signal,
    for which all ranks end before the last step with a StoppedError.
    """

    def __init__(self, learner: Learner, loader: Loader, run: Run, guard: Guard):
        self.learner, self.loader, self.mesh, self.run = learner, loader, learner.mesh, run
        self.progress, self.total_steps = Progress(), 0
        # Collective: opens the run's folder, once all checks have passed.
        self.begin_run: Callable[[], None] = lambda: None
        self.early_end: str | None = None
        self.interrupted: str | None = None
        self.empty_batches = 0  # batches without a counted target, and so without an update
        self.unsteady = ""  # why processors cannot be compared
        self.facts: list[str] = []
        self.differences: list[str] = []
        self.unknown: list[str] = []
        self.averages: Averages | None = None
        self.soundness = NumericsCheck(run, loader)
        self.judge = LossGuard(guard, scaled=learner.mixed.scale is not None)
        self.meter = Meter(self.mesh, self.mesh.ranks > 1 and learner.exchange.counts_bytes)
        self.callbacks = CallbackList(learner, self.meter)
        self._refused: Evaluation | None = None  # an evaluation that is not finite, which ends the training
        self.last_start = 0  # the last one of its `starts`; before, the folder may hold an older run
        self._base: dict[str, Any] = {}  # of an adapter
        self._unsaved = Unsaved()
        self._settings: LayerSettings | None = None  # the layers' settings at the first check

    @property
    def starts(self) -> int:
        """The number of times that a training of this process has begun in the run's folder."""
        return _starts[self.run.folder.resolve()]

    @property
    def continues(self) -> bool:
        """Whether there is another step."""
        return self.progress.step < self.total_steps and not (self.early_end or self.interrupted)

    def check_order(self) -> None:
        """Raises DivergenceError if a data set states different orders of this epoch on the ranks. Collective."""
        sampler, epoch = self.loader.sampler, self.progress.epoch
        if sampler.epoch_orders is None or self.mesh.ranks == 1:
            return
        sums = self.mesh.gather(checksum(sampler.order(epoch).tobytes()))
        if len(set(sums)) > 1:
            raise DivergenceError(
                f"epoch {epoch}: the data set's epoch_order is {' and '.join(dict.fromkeys(sums))} on different ranks, "
                "so some samples would be read twice and others never. Let it depend on its arguments alone: draw from "
                "numpy.random.default_rng((seed, epoch)), and change nothing that it reads on one rank only."
            )

    def end_epoch(self) -> None:
        """Counts the epoch and calls its callbacks, if its last batch is done. Collective."""
        if (
            self.progress.batch >= self.loader.sampler.batches_of(self.progress.epoch)
            and not self.interrupted
        ):
            self.progress = self.progress.next_epoch()
            if self.plateau is not None and self.plateau.every.due_at_epoch(self.progress.epoch):
                self.evaluate_for_schedule(self.plateau)
            self.call(self.moment("epoch"), self.callbacks.due_at_epoch(self.progress.epoch))

    def keep_averages(self, settings: Ema) -> None:
        """Keeps averages of the weights from now on, beginning with the present ones. Call it on every rank."""
        self.averages = Averages(self.learner, settings)

    def check(self, when: str, states: bool = False, cause: str = CHANGED) -> None:
        """Raises NotFiniteError unless all weights are finite, DivergenceError unless replicas are equal bit by bit and
        layers are set alike; with `states`, for optimizer states, too, and before the first update for running
        statistics. Collective; the same error on every rank.

        The message names the tensor, its rank, a likely `cause` of different values, the last good step and the
        checkpoint to go back to.
        """
        self.learner.weights.wait()
        try:
            self._check_settings(when)  # first: another learning rate explains other weights
            with self.learner.weights.optimizer_states_on_device() if states else NOTHING:
                tensors = [*state.optimizer_states(self.learner)] if states else []
                if states and not self.progress.step:  # later updates keep them equal
                    tensors += self.learner.synchronized_statistics()
                self.learner.check(when, tensors, cause)
        except (DivergenceError, NotFiniteError) as error:
            raise self.soundness.explained(error, self.progress.step) from None
        self.soundness.step = self.progress.step

    def _check_settings(self, when: str) -> None:
        """Raises DivergenceError if a layer or the rate was changed on some ranks; prints settings that a forward
        changes."""
        if self._settings is None:
            self._settings = LayerSettings(self.learner)
        for sentence in self._settings.check(when):
            if sentence not in self.learner.known_differences:
                self.learner.known_differences.append(sentence)
                if self.mesh.is_main:
                    print(f"{when}: {sentence}.", file=sys.stderr, flush=True)

    def snapshot(self, memory: HostMemory | None = None) -> Snapshot:
        """Synchronises buffers and takes this rank's part of a checkpoint, copied into `memory` if given. Collective.

        Raises NotFiniteError or DivergenceError, as `check` does: bad weights are not saved.
        """
        self.learner.weights.wait()
        self.learner.statistics.sync()
        step = self.progress.step
        self.check(f"before the checkpoint of step {step}, which was not written", states=True)
        if step:
            self._unsaved.print_new(self.learner)
        if self.learner.placed.base and not self._base:
            self._base = state.base_state(self.learner)
        snapshot = state.snapshot(
            self.learner, self.progress, self.run, self.loader,
            guard=self.judge.state(), averages=self.averages, base=self._base, memory=memory,
        )  # fmt: skip
        return replace(snapshot, checks=Checks(agreed=True, finite=True, step=step))

    def restore(self, checkpoint: Checkpoint) -> None:
        """Loads a checkpoint. In the same layout training continues bit by bit; in another, with the same global
        batches and the same counts."""
        self.restore_without_judge(checkpoint)
        self.judge.load(checkpoint.state.get("guard"))

    def restore_without_judge(self, checkpoint: Checkpoint) -> None:
        """Restores all but the judge's state."""
        self.learner.weights.wait()
        self.progress = state.restore(checkpoint, self.learner, self.averages, self.run.identity)
        self.soundness.step = None

    def add(self, callback: Callback) -> None:
        """Adds a callback, which is called from the next moment on. Call it on every rank.

        Raises UsageError unless it is a Callback, and for a method that looks like a moment's but is never called.
        """
        self.callbacks.add(callback)

    def stop(self, reason: str) -> None:
        """Implements `Training.stop`."""
        self.early_end = reason

    def evaluate(self) -> Evaluation:
        """Evaluates on every held-out sample and, once the training has begun and until another one begins in its
        folder, calls `evaluated` of all callbacks. Collective.

        Raises UsageError without held-out data, and NotFiniteError, after the callbacks, if a number of the evaluation
        is NaN or infinite. When a callback called it, the error is raised after the other callbacks of that moment, so
        that finite weights can still be saved.
        """
        if self.run.test_loader is None:
            raise UsageError("this run has no held-out data to evaluate on: give Run(test_loader=…).")
        evaluation = self._evaluation(self.run.test_loader)
        self._tell_evaluated(evaluation)
        if evaluation.not_finite and not self.callbacks.at_work:
            self._refuse_evaluation(evaluation)
        return evaluation

    def evaluate_for_schedule(self, plateau: Plateau) -> None:
        """Evaluates for a schedule that waits for a score; its rate changes before callbacks may save. Collective."""
        assert self.run.test_loader is not None, "refuse_schedule has looked"
        with self.meter.paused():
            evaluation = self._evaluation(self.run.test_loader)
            scored = math.isfinite(score := evaluation.numbers[plateau.watch])
            if scored and plateau.observe(score):
                self.learner.rate.apply()
                if self.mesh.is_main:
                    print(
                        f"step {self.progress.step}: {plateau.watch} has not improved on {plateau.best:.6g}: the "
                        f"learning rate is {plateau():.6g} from now on.", file=sys.stderr, flush=True,
                    )  # fmt: skip
            self._tell_evaluated(evaluation)
        self.learner.drop_gradients()  # which `call` does for all other moments
        if not scored:
            self._refuse_evaluation(evaluation)  # without a checkpoint, whose schedule would lack this score
        if evaluation.not_finite:
            self._end_by(evaluation)

    def refuse_schedule(self) -> None:
        """Raises UsageError for a schedule that waits for a score which no evaluation has. Collective."""
        if (plateau := self.plateau) is None:
            return
        if self.run.test_loader is None:
            raise UsageError(
                "schedule: plateau waits for a number of held-out samples, and there are none: give the data set a "
                "test split, or choose another schedule, such as wsd."
            )
        if self.learner.async_rank is not None:
            raise UsageError(
                "schedule: plateau lowers the rate of all ranks after one update, and ranks of this strategy do not "
                "wait for one another: choose another schedule, such as cosine, or a strategy that waits."
            )
        if plateau.watch not in (names := self.evaluation_names()):
            raise UsageError(unknown_number(plateau.watch, names, "schedule.watch"))

    @property
    def plateau(self) -> Plateau | None:
        """The schedule, if it waits for a score."""
        schedule = self.learner.rate.schedule
        return schedule if isinstance(schedule, Plateau) else None

    def _evaluation(self, loader: Loader) -> Evaluation:
        with heartbeat.within("evaluate"):
            self.learner.weights.wait()
            with self.learner.weights.means():
                evaluation = evaluate(self.learner, loader, self.mesh, self.run.metrics)
            if self.averages is not None:
                with self.averages.in_place():
                    averaged = evaluate(self.learner, loader, self.mesh, self.run.metrics)
                evaluation = evaluation.with_prefixed(EMA, averaged)
        return evaluation

    def _tell_evaluated(self, evaluation: Evaluation) -> None:
        if self.last_start and self.last_start == self.starts:
            self.callbacks.tell(self.moment("evaluated"), evaluation)
        if evaluation.not_finite:
            self._refused = evaluation

    def evaluation_names(self) -> set[str]:
        """Implements `Training.evaluation_names`. Collective."""
        if self.run.test_loader is None:
            return set()
        self.learner.weights.wait()
        with heartbeat.within("evaluate"):
            names = names_of_numbers(self.learner, self.run.test_loader, self.mesh, self.run.metrics)
        return names | ({EMA + name for name in names} if self.averages is not None else set())

    def look_at_itself(self) -> None:
        """Updates `facts`, `differences` and `unknown` from the learner. Collective."""
        self.facts, self.differences = self.learner.facts(), self.learner.differences()
        self.unknown = self.learner.unknown

    def tell_refuse(self) -> None:
        """Calls `refuse` of all callbacks."""
        self.callbacks.tell(self.moment("refuse"))

    def tell_start(self) -> None:
        """Calls `start` of all callbacks."""
        self.look_at_itself()
        self.last_start = _starts[self.run.folder.resolve()] = self.starts + 1
        self.callbacks.tell(self.moment("start"))
        self._unsaved.watch(self.callbacks, self.learner)

    def tell_gallery(self, gallery: Gallery) -> None:
        """Implements `Training.tell_gallery`."""
        self.callbacks.tell(self.moment("gallery"), gallery)

    def tell_saved(
        self, path: Path, progress: Progress | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        """Implements `Training.tell_saved`."""
        self.learner.weights.wait()
        self.callbacks.tell(replace(self.moment("saved", progress), numbers=numbers or {}), path)

    def tell_save_failed(self, error: CheckpointError, progress: Progress | None = None) -> None:
        """Implements `Training.tell_save_failed`."""
        self.learner.weights.wait()
        self.callbacks.tell(self.moment("save_failed", progress), error)

    def moment(self, name: Name, progress: Progress | None = None) -> Moment:
        return Moment(name=name, progress=progress or self.progress, trainer=self)

    def call(self, moment: Moment, callbacks: Iterable[Callback], *subject: Any) -> None:
        """Calls the moment's method of these callbacks. Then raises NotFiniteError if an evaluation of theirs was not
        finite."""
        self._refused = None
        self.callbacks.call(moment, callbacks, *subject)
        if self._refused is not None:
            self._end_by(self._refused)

    def _end_by(self, evaluation: Evaluation) -> NoReturn:
        """Raises `_refuse_evaluation`'s error; if only a metric failed, after the callbacks have saved the updates."""
        try:
            self._refuse_evaluation(evaluation)
        except UsageError:
            self.callbacks.call(self.moment("interrupted"), self.callbacks)
            raise

    def _refuse_evaluation(self, evaluation: Evaluation) -> NoReturn:
        """Raises NotFiniteError for an evaluation that is not finite: names bad weights or, if there are none, the bad
        sample; UsageError if a metric failed though the loss is finite."""
        when = f"the evaluation after step {self.progress.step}"
        self.check(f"by {when}")
        self.soundness.refuse_evaluation(evaluation, when)
