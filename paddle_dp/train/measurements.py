"""Measures where the time of some steps goes, on all ranks: soon after the start, and ever more rarely afterwards.

The heartbeat records these steps on a tape; `plan.rank_times` divides all ranks' tapes into parts. A measurement costs
each rank one message before and one after. On an accelerator ranks wait for the device between the parts of measured
steps only, so these take a little longer than others.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import paddle

from paddle_dp.checks.repeats import compute_without_exchange
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import AXES
from paddle_dp.mesh.device import synchronize
from paddle_dp.mesh.heartbeat import Tape, heartbeat
from paddle_dp.mesh.transport import traffic
from paddle_dp.plan.changes import Facts
from paddle_dp.plan.measured import NOT_MEASURED, Measured
from paddle_dp.plan.rank_times import attribute
from paddle_dp.train import processors
from paddle_dp.train.meter import peak_memory
from paddle_dp.train.steps import Phase, ProcessorsHook, StepHook, TrainStep
from paddle_dp.train.stragglers import Stragglers
from paddle_dp.train.training_state import TrainingState

if TYPE_CHECKING:
    from paddle_dp.data import Batch

AFTER = 10  # steps before the first measurement: the first ones are slower
STEPS = 20  # steps of a measurement
RARER = 10  # the next one begins after this many times as many steps
OFTEN = 50  # steps until the next one, where `is_shown`
PIECE = 32 << 20  # bytes of gradients that are exchanged to time it


class Measurements(StepHook):
    """Decides which steps are measured, and measures them. `is_shown`: the user sees each one (`train --why`)."""

    phase = Phase.MEASURE

    def __init__(self, training: TrainingState):
        self._training, self.is_shown = training, False
        self.learner, self.loader, self.run = training.learner, training.loader, training.run
        self.mesh: Mesh = training.mesh
        self.stragglers: Stragglers | None = None
        self.due = -1  # the step after which something begins or ends; -1: none
        self._first = self._began = self._steps = self._total = 0
        self._local_ranks = 1
        self._tape: Tape | None = None
        self._zero = self._busy = self._workers = self._sent = 0.0

    def plan(self, step: int, total: int) -> None:
        """Plans the first measurement, before the first update: `step` of `total` updates are done."""
        left = total - step
        self._first, self._total = step + min(AFTER, left // 3), total
        self._due_at(self._first if left >= 3 else total)

    def watch(self) -> None:
        """Shows the user each measurement from now on, or says why there is none."""
        self.is_shown = True
        if self.learner.async_rank is not None and self.mesh.is_main:
            print(f"--why shows nothing here. {NOT_MEASURED}", flush=True)

    def compare_ranks(self) -> Stragglers | None:
        """Begins to compare the ranks' times; None if the training has one rank, or its ranks do not wait for one
        another."""
        if self.mesh.ranks > 1 and self.learner.async_rank is None:
            self.stragglers = Stragglers.from_sampler(self.loader.sampler, self.mesh)
        return self.stragglers

    def slowest_numbers(self) -> dict[str, float]:
        """The numbers of the slowest rank, for callbacks."""
        return {} if self.stragglers is None else self.stragglers.slowest_numbers

    def hooks(self) -> list[StepHook]:
        """The hooks of all watches."""
        every = self._training.judge.guard.recompute
        return [self] if every is None else [self, ProcessorsHook(self._training, every, processors.check)]

    def after_update(self, step: TrainStep) -> None:
        if step.number != self.due:
            return
        training, measured = self._training, None
        training.learner.weights.wait()
        with training.meter.paused():
            if self._tape is None:
                self._begin(step.number)
            else:
                measured = self._end(step.number, step.batch)
        if measured is not None:
            training.call(training.moment("measured"), training.callbacks, measured)

    def _due_at(self, step: int) -> None:
        """Lets the next measurement begin after this step, if at least one step is left to be measured."""
        self._steps = min(STEPS, self._total - step)
        self.due = step if self._steps > 0 else -1

    def drop(self) -> None:
        """Discards a begun measurement, since the training ends or goes back."""
        if self._tape is not None:
            heartbeat.end_tape()
            self._tape = None
            self.due = -1

    after_rewind = drop

    def _begin(self, step: int) -> None:
        self._began, self.due = step, step + self._steps
        self._tape, self._sent = self._new_tape(), traffic.sent
        self._busy, self._workers = time.process_time(), self.loader.workers_busy()
        # A barrier, too: ranks of all machines begin together.
        self._local_ranks = self.mesh.gather(self.mesh.host).count(self.mesh.host)
        self._zero = time.monotonic()
        heartbeat.begin_tape(self._tape)

    def _end(self, step: int, batch: Batch) -> Measured:
        heartbeat.end_tape()
        seconds, tape = time.monotonic() - self._zero, self._tape
        assert tape is not None
        self._tape = None
        row = {
            "host": self.mesh.host, "zero": self._zero, "seconds": seconds, "steps": self._steps,
            "tape": tape.as_json(),
            "sent": (traffic.sent - self._sent) / self._steps,
            "busy": time.process_time() - self._busy, "workers_busy": self.loader.workers_busy() - self._workers,
        }  # fmt: skip
        inside = any(computes for *_, computes in tape.waits)  # the same on every rank
        with heartbeat.within("callbacks", "measuring a step"):
            row["alone"] = self._exchange_alone() if inside else 0.0
            row["bare"] = self._bare_backward(batch) if self.is_shown and inside else None
            rows = self.mesh.gather(row)
        components = attribute(rows)
        sent = sum(row["sent"] for row in rows) / len(rows) if self.learner.exchange.counts_bytes else 0.0
        first, rarer = self._began + 1, self._first + RARER * max(AFTER, self._began - self._first)
        self._due_at(step + OFTEN if self.is_shown else rarer)
        facts = self._facts(sent)
        return Measured(first=first, last=step, rank_times=components, facts=facts, is_shown=self.is_shown)

    def _new_tape(self) -> Tape:
        return Tape(None if self.mesh.device == "cpu" else paddle.device.synchronize)

    def _exchange_alone(self) -> float:
        """Seconds to all-reduce a step's gradients while nothing else runs; above 32 MB, extrapolated from a part.
        Collective."""
        size = sum(parameter.size * parameter.element_size() for parameter in self.learner.trainable)
        buffer = paddle.zeros([max(min(size, PIECE) // 4, 1)], "float32")
        took = []
        for _ in range(2):
            self.mesh.gather(0)
            began = time.monotonic()
            self.mesh.sum_tensor(buffer)
            synchronize(self.mesh.device)
            took.append(time.monotonic() - began)
        return min(took) * max(size / PIECE, 1.0)

    def _bare_backward(self, batch: Batch) -> float:
        """Mean seconds of a micro-batch's backward without gradient exchange. Collective."""
        took = []
        for _ in range(2):
            tape = self._new_tape()
            heartbeat.begin_tape(tape)
            try:
                compute_without_exchange(self.learner, batch)
            finally:
                heartbeat.end_tape()
            active = tape.active_seconds.items()
            took.append(sum(seconds for (phase, _), seconds in active if phase == "backward"))
        return min(took) / len(batch.micro_batches)

    def _facts(self, sent: float) -> Facts:
        sampler, axes, recipe = self.loader.sampler, self.mesh.axes, self.run.recipe
        return Facts(
            batch=sampler.batch, micro_batches=sampler.micro_batches, num_workers=self.loader.num_workers,
            cores=_cores(), local_ranks=self._local_ranks, load=_load(), servers=axes.servers, sent=sent,
            degrees={axis: axes[axis] for axis in AXES if axes[axis] > 1}, recompute=str(self.run.layout.recompute),
            device=self.mesh.device, free=_free_memory(self.mesh.device, self._local_ranks),
            peak=peak_memory(self.mesh.device),
            one_process=recipe is not None and recipe.strategy.config.single_process,
        )  # fmt: skip


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _free_memory(device: str, ranks: int) -> int:
    """Free bytes of the device, or a rank's share of this machine's free memory; 0 if unknown."""
    if device.startswith("gpu"):
        total = int(paddle.device.cuda.get_device_properties(device).total_memory)
        return total - int(paddle.device.max_memory_reserved(device))
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(ranks, 1)
    except (ValueError, OSError):
        return 0


def _load() -> float:
    """Runnable processes of this machine, in the mean of the last minute; 0.0 if unknown."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
