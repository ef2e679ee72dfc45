"""The hooks of the synchronous loop, one for each concern of a step."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

from paddle_dp.checkpoint import load
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import processors
from paddle_dp.train.callback import Moment
from paddle_dp.train.judge import Refusal
from paddle_dp.train.measured import Measurements
from paddle_dp.train.meter import worker_averages
from paddle_dp.train.refusals import Refusals
from paddle_dp.train.steps import Phase, StepHook, TrainStep
from paddle_dp.train.stopping import StopRequests
from paddle_dp.train.stragglers import Stragglers
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Every


class GuardHook(StepHook):
    """Skips batches that were refused before, and handles updates that the judge refuses (guard.non_finite)."""

    phase = Phase.GUARD

    def __init__(
        self,
        training: TrainingState,
        refusals: Refusals,
        requests: StopRequests,
        measurements: Measurements,
    ):
        self._training, self._judge, self._refusals = training, training.judge, refusals
        self._requests, self._measurements = requests, measurements

    def before_update(self, step: TrainStep) -> None:
        self._judge.why = ""
        step.refusal = self._refusals.repetition(step.batch, step.number)

    def after_update(self, step: TrainStep) -> None:
        if self._judge.why and step.metrics is not None:
            step.refusal = self._refusals.refusal_of(step.batch, step.number, step.metrics)
        if step.refusal is None:
            self._judge.accepted(step.number)
        elif step.refusal.action == "rewind":
            step.rewound = self._rewind(step.refusal)

    def _rewind(self, refusal: Refusal) -> bool:
        """Restores the newest checkpoint; the batch is skipped when it comes again. False if there is none: then the
        update is skipped. Collective."""
        training = self._training
        moment = training.moment("rewinding")
        training.call("rewinding", training.callbacks, lambda c: c.rewinding(moment))
        with training.meter.paused(), heartbeat.within("checkpoint", "going back to the last one"):
            path = self._refusals.checkpoint_before(training.progress.step)
            if path is None:
                return False
            checkpoint, batch = load(path, training.mesh), (refusal.epoch, refusal.batch)
            training.restore_without_judge(checkpoint)
            self._judge.go_back(checkpoint.state.get("guard"), batch)
        heartbeat.step = training.progress.step
        self._measurements.drop()
        self._requests.went_back()
        report_refusal(training, self._refusals, refusal, back_to=training.progress.step)
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


class CallbackHook(StepHook):
    """Calls the callbacks that are due, with the numbers of the step if one of them reads."""

    phase = Phase.CALLBACKS

    def __init__(self, training: TrainingState, refusals: Refusals, stragglers: Stragglers | None):
        self._training, self._refusals, self._stragglers = training, refusals, stragglers

    def after_update(self, step: TrainStep) -> None:
        training, due = self._training, step.due
        if step.refusal is not None:
            due = [callback for callback in due if not callback.reads]
            report_refusal(training, self._refusals, step.refusal)
        if due:
            has_numbers = step.reads and step.metrics is not None and step.refusal is None
            numbers = self._numbers(step) if has_numbers else {}
            moment = Moment(name="step", progress=training.progress, trainer=training, numbers=numbers)
            training.call("step", due, lambda c: c.step(moment))

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
        speed, servers = training.meter.read(step.batch), training.mesh.axes.servers
        if servers:  # the first server writes the lines, and has no samples
            rows = training.mesh.gather(speed)
            speed = worker_averages(rows, servers) if training.mesh.is_main else speed
        numbers = {**metrics, "lr": step.rate, **speed}
        if self._stragglers is not None and (slowest := self._stragglers.slowest) is not None:
            numbers |= {"slowest_rank": float(slowest.rank), "slowest_times_others": slowest.times}
        return numbers | ({"loss_scale": scale.scale} if scale else {})


class ProcessorsHook(StepHook):
    """Raises ProcessorError where ranks compute different gradients from the same samples (guard.recompute)."""

    phase = Phase.PROCESSORS

    def __init__(self, training: TrainingState, every: Every):
        self._training, self._every = training, every

    def after_update(self, step: TrainStep) -> None:
        training = self._training
        if training.unsteady or not self._every.due_at_step(step.number):
            return
        training.learner.weights.wait()
        with training.meter.paused():
            training.unsteady = processors.check(training.learner, step.batch, f"after step {step.number}")
        if training.unsteady and training.mesh.is_main:
            print(training.unsteady, file=sys.stderr, flush=True)


class StopHook(StepHook):
    """Ends the training where a rank was asked to stop."""

    phase = Phase.STOP

    def __init__(self, training: TrainingState, requests: StopRequests):
        self._training, self._requests = training, requests

    def after_update(self, step: TrainStep) -> None:
        if not step.is_last and not self._training.stopped:
            self._training.interrupted = self._requests.due(step.number)


class MeasureHook(StepHook):
    """Begins to measure where the time of steps goes, and reports it, where that is due."""

    phase = Phase.MEASURE

    def __init__(self, training: TrainingState, measurements: Measurements):
        self._training, self._measurements = training, measurements

    def after_update(self, step: TrainStep) -> None:
        training = self._training
        if step.number != self._measurements.due:
            return
        training.learner.weights.wait()
        with training.meter.paused():
            measured = self._measurements.after(step.number, step.batch)
        if measured is not None:
            moment = training.moment("measured")
            training.call("measured", training.callbacks, lambda c: c.measured(moment, measured))


def report_refusal(
    training: TrainingState, refusals: Refusals, refusal: Refusal, back_to: int | None = None
) -> None:
    """Prints a refusal, and calls `refused` of all callbacks. `back_to`: the step to which the training went back."""
    refusals.show(refusal, back_to)
    if back_to is None and refusal.action == "rewind":
        refusal = replace(refusal, action="skip")
    moment = training.moment("refused")
    training.call("refused", training.callbacks, lambda c: c.refused(moment, refusal))
