"""The synchronous loop: one update from each global batch, and the hooks around it.

    hooks before · learner.train_batch · hooks after, in the order of `Phase`

A new concern of a step is a hook with a phase; the loop itself stays as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from paddle_dp.batch import Batch
from paddle_dp.checkpoint import load
from paddle_dp.core.memory_error import memory_error
from paddle_dp.core.plateau import Plateau
from paddle_dp.errors import DivergenceError, NotFiniteError, TargetError
from paddle_dp.learner import Learner
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import blame
from paddle_dp.train.callback import Callback, Moment
from paddle_dp.train.judge import Refusal
from paddle_dp.train.meter import reader_averages
from paddle_dp.train.refusals import Refusals
from paddle_dp.train.stopping import StopRequests
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Every

Metrics = Mapping[str, float]


class Phase(IntEnum):
    """The order of hooks after an update. Hooks that are collective run in one order on all ranks."""

    GUARD = 10  # refusals of updates, rewinds
    PROGRESS = 20  # counts, averages of weights
    SPEED = 30  # empty batches, the meter
    WEIGHTS = 40  # equal and finite on all ranks
    SCHEDULE = 45  # evaluations that set the learning rate
    CALLBACKS = 50  # numbers, and the user's callbacks
    PROCESSORS = 60  # gradients that are computed once more
    STOP = 70  # signals, the time limit, stragglers' times
    MEASURE = 80  # where the time of steps goes


@dataclass
class TrainStep:
    """One step, as its hooks see it. `number` counts from 1. `due`: the callbacks that are called after it; `reads`:
    whether one of them reads numbers; `rate`: the learning rate then. A hook that sets `refusal` before the update
    skips it; one that sets it later reports that the learner has refused it. `rewound`: the training went back to a
    checkpoint, and no later hook is called.
    """

    number: int
    batch: Batch
    is_last: bool
    due: list[Callback]
    reads: bool
    rate: float
    metrics: Metrics | None = field(default=None, init=False)
    refusal: Refusal | None = field(default=None, init=False)
    rewound: bool = field(default=False, init=False)


class StepHook:
    """Reacts to the steps of a training. A method that a subclass does not override costs nothing in a step."""

    phase: Phase

    def before_update(self, step: TrainStep) -> None: ...

    def after_update(self, step: TrainStep) -> None: ...

    def after_rewind(self) -> None:
        """Called after the training went back to a checkpoint."""


class StepDriver:
    """Trains until the end: an update from each global batch, with `hooks` in the order of their phases."""

    def __init__(self, training: TrainingState, hooks: Iterable[StepHook]):
        self._training = training
        self._approve = training.judge.approve if training.judge.judges else None
        ordered = sorted(hooks, key=lambda hook: hook.phase)
        self._before, self._after, self._after_rewind = (
            _overriding(ordered, method) for method in ("before_update", "after_update", "after_rewind")
        )

    def run(self) -> None:
        training = self._training
        with training.learner.training():
            while training.continues:
                training.check_order()
                for batch in training.loader.read(training.progress.epoch, training.progress.batch):
                    if self.make_step(batch).rewound or not training.continues:
                        break
                training.end_epoch()

    def make_step(self, batch: Batch) -> TrainStep:
        """One update, or none where a hook skips it, and all hooks. Collective."""
        training, number = self._training, self._training.progress.step + 1
        is_last = number >= training.total_steps
        due = training.callbacks.due_at_step(number, is_last)
        reads = any(callback.reads for callback in due)
        rate = training.learner.optimizer.get_lr() if reads else 0.0
        step = TrainStep(number, batch, is_last, due, reads, rate)
        for hook in self._before:
            hook(step)
        if step.refusal is None:
            step.metrics = self.train_batch(step)
        else:
            training.learner.skip_update()
        for hook in self._after:
            hook(step)
            if step.rewound:
                for rewound in self._after_rewind:
                    rewound()
                break
        heartbeat.enter("data")
        return step

    def train_batch(self, step: TrainStep) -> Metrics | None:
        """The update of a step, whose errors name step, samples and tensors. Collective."""
        training = self._training
        try:
            return training.learner.train_batch(step.batch, step.reads, self._approve)
        except NotFiniteError as error:
            raise training.soundness.explained(error, training.progress.step) from None
        except DivergenceError as error:
            raise DivergenceError(f"step {step.number}: {error}") from None
        except (MemoryError, OSError, SystemError) as error:
            if (cause := memory_error(error)) is None:
                raise
            raise blame.out_of_memory(cause, training.learner, training.mesh, step.number) from error
        except TargetError as error:
            batch = step.batch
            raise blame.bad_target(training.loader, batch.epoch, batch.index, error) from None


def _overriding(hooks: list[StepHook], method: str) -> list[Any]:
    base = getattr(StepHook, method)
    return [getattr(hook, method) for hook in hooks if getattr(type(hook), method) is not base]


# The hooks of the loop ------------------------------------------------------------------------------------------------


class GuardHook(StepHook):
    """Skips batches that were refused before, and handles updates that the judge refuses (guard.non_finite)."""

    phase = Phase.GUARD

    def __init__(self, training: TrainingState, refusals: Refusals):
        self._training, self._judge, self._refusals = training, training.judge, refusals

    def before_update(self, step: TrainStep) -> None:
        self._judge.why = ""
        step.refusal = self._refusals.repetition(step.batch, step.number)

    def after_update(self, step: TrainStep) -> None:
        if self._judge.why and step.metrics is not None:
            step.refusal = self._refusals.refusal_of(step.batch, step.number, step.metrics)
        if step.refusal is None:
            self._judge.count_update(step.number)
        elif step.refusal.action == "rewind":
            step.rewound = self._rewind(step.refusal)

    def _rewind(self, refusal: Refusal) -> bool:
        """Restores the newest checkpoint; the batch is skipped when it comes again. False if there is none: then the
        update is skipped. Collective."""
        training = self._training
        training.call(training.moment("rewinding"), training.callbacks)
        with training.meter.paused(), heartbeat.within("checkpoint", "going back to the last one"):
            path = self._refusals.checkpoint_before(training.progress.step)
            if path is None:
                return False
            checkpoint, batch = load(path, training.mesh), (refusal.epoch, refusal.batch)
            training.restore_without_judge(checkpoint)
            self._judge.go_back(checkpoint.state.get("guard"), batch)
        heartbeat.step = training.progress.step
        self._refusals.report(refusal, back_to=training.progress.step)
        return True


class ProgressHook(StepHook):
    """Counts an update that was made or skipped, and averages the weights."""

    phase = Phase.PROGRESS

    def __init__(self, training: TrainingState):
        self._training = training

    def after_update(self, step: TrainStep) -> None:
        training = self._training
        training.progress = training.progress.advance(step.batch.samples)
        if training.averages is not None:
            training.averages.update(training.progress.step)
        heartbeat.step = training.progress.step


class SpeedHook(StepHook):
    """Counts samples, and prints a line for the first, tenth, hundredth and thousandth batch without an update, which
    may be a mistake."""

    phase = Phase.SPEED

    def __init__(self, training: TrainingState):
        self._training = training

    def after_update(self, step: TrainStep) -> None:
        if self._training.learner.empty:
            self._training.empty_batches += 1
            if self._training.mesh.is_main and self._training.empty_batches in (1, 10, 100, 1000):
                self._print_empty(step)
        self._training.meter.add(step.batch.samples, step.batch.waited)

    def _print_empty(self, step: TrainStep) -> None:
        count = self._training.empty_batches
        often = f" ({count} batches so far)" if count > 1 else ""
        print(
            f"step {step.number}: not one target of this global batch of {step.batch.samples} samples counts, so "
            f"no update was made from it{often}. Look at the data, and at the targets that the loss ignores "
            "(loss.ignore_index).",
            file=sys.stderr,
            flush=True,
        )


class WeightsHook(StepHook):
    """Checks that weights are finite, and bit-equal on the ranks that hold copies (strategy.check_every)."""

    phase = Phase.WEIGHTS

    def __init__(self, training: TrainingState, every: Every):
        self._training, self._every = training, every

    def after_update(self, step: TrainStep) -> None:
        if self._every.due_at_step(step.number):
            self._training.check(f"after step {step.number}")


class PlateauHook(StepHook):
    """Evaluates for a schedule that waits for a score, every so many steps; after epochs the training does."""

    phase = Phase.SCHEDULE

    def __init__(self, training: TrainingState, plateau: Plateau):
        self._training, self._plateau = training, plateau

    def after_update(self, step: TrainStep) -> None:
        if self._plateau.every.due_at_step(step.number):
            self._training.evaluate_for_schedule(self._plateau)


class CallbackHook(StepHook):
    """Calls the callbacks that are due, with the numbers of the step if one of them reads; `slowest_numbers` gives
    the slowest rank's."""

    phase = Phase.CALLBACKS

    def __init__(
        self,
        training: TrainingState,
        refusals: Refusals,
        slowest_numbers: Callable[[], Mapping[str, float]],
    ):
        self._training, self._refusals, self._slowest_numbers = training, refusals, slowest_numbers

    def after_update(self, step: TrainStep) -> None:
        training, due = self._training, step.due
        if step.refusal is not None:
            due = [callback for callback in due if not callback.reads]
            self._refusals.report(step.refusal)
        if due:
            has_numbers = step.reads and step.metrics is not None and step.refusal is None
            numbers = self._numbers(step) if has_numbers else {}
            moment = Moment(name="step", progress=training.progress, trainer=training, numbers=numbers)
            training.call(moment, due)

    def _numbers(self, step: TrainStep) -> dict[str, float]:
        """The metrics of the update just made, its learning rate and the speed. Raises NotFiniteError, on every rank,
        if the loss or the gradient norm is not finite."""
        training, metrics = self._training, step.metrics or {}
        learner, scale = training.learner, training.learner.mixed.scale
        if not math.isfinite(metrics["loss"]) and not learner.empty:
            training.soundness.refuse_loss(metrics["loss"], step.number, learner.local_loss)
        # With a loss scale, an update whose gradients overflow is skipped instead.
        if not math.isfinite(metrics["gradient_norm"]) and scale is None:
            faulty = learner.faulty_gradients
            training.soundness.refuse_gradients(metrics["gradient_norm"], faulty, step.number)
        training.soundness.finite = step.number
        speed, mesh = training.meter.read(step.batch), training.mesh
        if not mesh.all_read:  # rank 0 writes the lines, and has no samples
            rows = mesh.gather(speed)
            speed = reader_averages(rows, mesh.readers) if mesh.is_main else speed
        numbers = {**metrics, "lr": step.rate, **speed, **self._slowest_numbers()}
        return numbers | ({"loss_scale": scale.scale} if scale else {})


class ProcessorsHook(StepHook):
    """Calls `check` as often as guard.recompute says. It raises ProcessorError where ranks compute different gradients
    from the same samples; a sentence that it returns is printed, and ends the checks."""

    phase = Phase.PROCESSORS

    def __init__(self, training: TrainingState, every: Every, check: Callable[[Learner, Batch, str], str]):
        self._training, self._every, self._check = training, every, check

    def after_update(self, step: TrainStep) -> None:
        training = self._training
        if training.unsteady or not self._every.due_at_step(step.number):
            return
        training.learner.weights.wait()
        with training.meter.paused():
            training.unsteady = self._check(training.learner, step.batch, f"after step {step.number}")
        if training.unsteady and training.mesh.is_main:
            print(training.unsteady, file=sys.stderr, flush=True)


class StopHook(StepHook):
    """Ends the training where a rank was asked to stop."""

    phase = Phase.STOP

    def __init__(self, training: TrainingState, requests: StopRequests):
        self._training, self._requests = training, requests

    def after_update(self, step: TrainStep) -> None:
        if not step.is_last and not self._training.early_end:
            self._training.interrupted = self._requests.due(step.number)

    def after_rewind(self) -> None:
        self._requests.went_back()
