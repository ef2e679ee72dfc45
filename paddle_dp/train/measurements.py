"""Measures where the time of some steps goes, on all ranks: soon after the start, and ever more rarely afterwards.

`Stragglers` names a rank that is slower than its peers, which do the same work, and the phase in which it is slow.

The heartbeat records these steps on a tape; `plan.rank_times` divides all ranks' tapes into parts. A measurement costs
each rank one message before and one after. On an accelerator ranks wait for the device between the parts of measured
steps only, so these take a little longer than others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import paddle

from paddle_dp.checks.repeats import compute_without_exchange
from paddle_dp.data import Sampler
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import AXES
from paddle_dp.mesh.device import synchronize
from paddle_dp.mesh.heartbeat import Tape, heartbeat
from paddle_dp.mesh.transport import traffic
from paddle_dp.plan.changes import Facts
from paddle_dp.plan.measured import NOT_MEASURED, Measured
from paddle_dp.plan.rank_times import attribute
from paddle_dp.text import duration
from paddle_dp.train import processors
from paddle_dp.train.meter import peak_memory
from paddle_dp.train.steps import Phase, ProcessorsHook, StepHook, TrainStep
from paddle_dp.train.training_state import TrainingState

if TYPE_CHECKING:
    from paddle_dp.data import Batch

AFTER = 10  # steps before the first measurement: the first ones are slower
STEPS = 20  # steps of a measurement
RARER = 10  # the next one begins after this many times as many steps
OFTEN = 50  # steps until the next one, with `watched`
PIECE = 32 << 20  # bytes of gradients that are exchanged to time it
PHASES = ("data", "forward", "backward", "exchange", "update")
SLOW, NO_LONGER = 1.5, 1.25  # ratios to the others' time: slow from the first on, until below the second
MATTERS = 0.1  # least delay, as a fraction of a step: a smaller one delays no other rank
LATER = 0.010  # least delay, in seconds per step: less is the machine's other work, in steps of few ms
# A rank is named after so many meetings in a row, over so many steps: a machine may be busy for a while.
MEETINGS, STREAK_STEPS = 3, 5


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """A rank's busy seconds between two meetings, and the `usual_seconds` of its peers for as many samples.

    `phase`: the one of most of its delay; `delays`: whether that is long enough to delay others.
    """

    rank: int
    peers: Sequence[int]
    seconds: float
    usual_seconds: float
    phase: str
    delays: bool

    @property
    def times(self) -> float:
        """The ratio to the peers' time."""
        return self.seconds / max(self.usual_seconds, 1e-9)


@dataclass
class _Streak:
    """A rank's state at the last meetings: for how many in a row, and since which step, it has been (not) slow."""

    slow: bool = False
    meetings: int = 0
    since: int = 0


@dataclass
class Stragglers:
    """Compares the ranks' busy times. `shares`: how many samples of a full batch each rank computes.

    Every rank's heartbeat adds up its busy time, without waiting for others, by phase. The times travel in the
    all-reduce with which the ranks agree on stopping, every two seconds or so (`stopping`). Each rank is compared with
    the median of the others that hold the same pipeline stage, since the stages of a model differ by nature. Other work
    than updates (evaluations, checkpoints, callbacks) does not count.

    `slowest` is of the last meeting, None before the second and if no rank has peers. `named` are the ranks that are
    slow now.
    """

    mesh: Mesh
    shares: Sequence[int]
    slowest: RankPace | None = field(default=None, init=False)
    named: set[int] = field(default_factory=set, init=False)
    _streaks: dict[int, _Streak] = field(default_factory=dict, init=False)
    _step: int | None = field(default=None, init=False)  # of the last meeting
    _spent: Mapping[str, float] = field(default_factory=dict, init=False)  # until then

    @classmethod
    def from_sampler(cls, sampler: Sampler, mesh: Mesh) -> Stragglers:
        """Compares the ranks that compute the sampler's batches."""
        axes = mesh.axes
        shares = [sampler.samples_of_rank(axes.dp_rank(rank), axes.dp_size) for rank in range(mesh.ranks)]
        return cls(mesh, shares)

    @property
    def slowest_numbers(self) -> dict[str, float]:
        """The numbers of the slowest rank for callbacks; none if it is not known."""
        if self.slowest is None:
            return {}
        return {"slowest_rank": float(self.slowest.rank), "slowest_times_others": self.slowest.times}

    def bring(self, seconds: float) -> list[float]:
        """This rank's part of a meeting's sum over all ranks: at its position its busy seconds by phase since the last
        one, and the `seconds` that have passed; elsewhere zeros."""
        before, self._spent = self._spent, heartbeat.spent()
        rows = [[0.0] * (len(PHASES) + 1) for _ in range(self.mesh.ranks)]
        by_phase = [self._spent.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES]
        rows[self.mesh.rank] = [*by_phase, seconds]
        return [number for row in rows for number in row]

    def hear(self, numbers: Sequence[float], step: int) -> list[str]:
        """Takes the sum of all ranks' `bring` at `step`. Returns a sentence for each rank that has become slow, or is
        no longer; the same on every rank."""
        before, self._step = self._step, step
        if before is None or step <= before:
            return []  # start-up and the first steps, or the training went back
        row = len(PHASES) + 1
        rows = [numbers[row * rank : row * (rank + 1)] for rank in range(self.mesh.ranks)]
        all_peers = {rank: self._peers(rank) for rank in range(self.mesh.ranks)}
        paces = [self._pace(rank, peers, rows, step - before) for rank, peers in all_peers.items() if peers]
        self.slowest = max(paces, key=lambda pace: pace.times, default=None)
        return [sentence for pace in paces for sentence in self._judge(pace, before, step)]

    def _pace(self, rank: int, peers: list[int], rows: Sequence[Sequence[float]], steps: int) -> RankPace:
        *phase_seconds, passed = rows[rank]
        share = max(1.0, self.shares[rank] / max(median(self.shares[peer] for peer in peers), 1))
        usual = [share * median(rows[peer][n] for peer in peers) for n in range(len(PHASES))]
        delays = [here - there for here, there in zip(phase_seconds, usual, strict=True)]
        seconds = sum(phase_seconds)
        usual_seconds = median(sum(rows[peer][:-1]) for peer in peers) * share
        return RankPace(
            rank=rank, peers=peers, seconds=seconds, usual_seconds=usual_seconds,
            phase=PHASES[delays.index(max(delays))],
            delays=seconds - usual_seconds >= max(MATTERS * passed, LATER * steps),
        )  # fmt: skip

    def _peers(self, rank: int) -> list[int]:
        """The other ranks with the same stage of the model; for a server, the other servers."""
        axes = self.mesh.axes

        def kind(number: int) -> tuple[int, bool]:
            return axes.coords(number)["pipeline"], axes.reads(number)

        return [r for r in range(self.mesh.ranks) if r != rank and kind(r) == kind(rank)]

    def _judge(self, pace: RankPace, before: int, step: int) -> list[str]:
        """A sentence, if the rank has become slow between the meetings at these steps, or is no longer."""
        streak, is_named = self._streaks.setdefault(pace.rank, _Streak()), pace.rank in self.named
        slow = pace.times >= (NO_LONGER if is_named else SLOW) and pace.delays
        if slow != streak.slow or not streak.meetings:
            self._streaks[pace.rank] = streak = _Streak(slow, 0, before)
        streak.meetings += 1
        if streak.meetings < MEETINGS or step - streak.since < STREAK_STEPS or slow == is_named:
            return []
        peers = "the others" if len(pace.peers) > 1 else f"rank {pace.peers[0]}"
        if not slow:
            self.named.discard(pace.rank)
            return [f"rank {pace.rank} is as fast as {peers} again, since step {streak.since}"]
        self.named.add(pace.rank)
        steps, possessive = step - before, f"{peers}'" if peers.endswith("s") else f"{peers}'s"
        per_step = f"{duration(pace.seconds / steps)} against {duration(pace.usual_seconds / steps)}"
        return [
            f"rank {pace.rank} takes {pace.times:.1f} × {possessive} time per step for {step - streak.since} steps "
            f"({per_step}, without waiting), most of it in {pace.phase}"
        ]


class Measurements(StepHook):
    """Decides which steps are measured, and measures them. `watched`: the user sees each one (`train --why`)."""

    phase = Phase.MEASURE

    def __init__(self, training: TrainingState):
        self._training, self.watched = training, False
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
        self.watched = True
        if self.learner.worker is not None and self.mesh.is_main:
            print(f"--why shows nothing here. {NOT_MEASURED}", flush=True)

    def compare_ranks(self) -> Stragglers | None:
        """Begins to compare the ranks' times; None if the training has one rank, or its ranks do not wait for one
        another."""
        if self.mesh.ranks > 1 and self.learner.worker is None:
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
            row["bare"] = self._bare_backward(batch) if self.watched and inside else None
            rows = self.mesh.gather(row)
        components = attribute(rows)
        sent = sum(row["sent"] for row in rows) / len(rows) if self.learner.exchange.counts_bytes else 0.0
        first, rarer = self._began + 1, self._first + RARER * max(AFTER, self._began - self._first)
        self._due_at(step + OFTEN if self.watched else rarer)
        facts = self._facts(sent)
        return Measured(first=first, last=step, rank_times=components, facts=facts, watched=self.watched)

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
