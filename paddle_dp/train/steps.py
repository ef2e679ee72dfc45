"""The synchronous loop: one update from each global batch, and the hooks around it.

    hooks before · learner.train_batch · hooks after, in the order of `Phase`

A new concern of a step is a hook (step_hooks.py) with a phase; the loop itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from paddle_dp.core.memory_error import memory_error
from paddle_dp.data import Batch
from paddle_dp.errors import DivergenceError, NotFiniteError, TargetError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import blame
from paddle_dp.train.callback import Callback
from paddle_dp.train.judge import Refusal
from paddle_dp.train.training_state import TrainingState

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
        ordered = sorted(hooks, key=lambda hook: hook.phase)
        self._before, self._after, self._after_rewind = (
            _overriding(ordered, method) for method in ("before_update", "after_update", "after_rewind")
        )

    def run(self) -> None:
        training = self._training
        with training.learner.training():
            while training.continues:
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
        accept = training.judge.accept if training.judge.judges else None
        try:
            return training.learner.train_batch(step.batch, step.reads, accept)
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
