"""Asynchronous training loop: between two meetings each rank processes as many shares as it can.

A step is one global batch. Within a round ranks claim shares of global batches, in order (train/claims.py), so a slow
rank computes fewer, and each sample of an epoch is learned exactly once. Within a round a rank's progress counts global
batches that have been handed out entirely; at a meeting these are done. The ranks meet when the training needs one
state: when a callback that does not read is due (an evaluation, a checkpoint), when weights are checked, at the end of
an epoch and of the training, and when a rank was asked to stop.

Callbacks that read are called on each rank when its progress passes their step. On the main rank their numbers are
means over the shares of this and earlier steps reported until then; on other ranks, over the rank's shares. Without new
shares they are the last known numbers; before the first, a line has no loss. Callbacks may do collective work only when
the ranks have met (`Moment.together`).
"""

from __future__ import annotations

import math
import time

from paddle_dp.data import Batch
from paddle_dp.errors import TargetError
from paddle_dp.learner.learner import AsyncWorker
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.train import blame
from paddle_dp.train.callback import Moment
from paddle_dp.train.claims import WorkQueue, claims_of
from paddle_dp.train.ledger import Sums, means
from paddle_dp.train.meter import tokens
from paddle_dp.train.stopping import StopRequests
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Every

Numbers = dict[str, float]


class RoundDriver:
    """Trains until the end in rounds, in which `worker` computes shares or serves those that do. `check_every`: how
    often the ranks meet to compare weights; `requests`: to stop the training."""

    def __init__(
        self, training: TrainingState, worker: AsyncWorker, requests: StopRequests, check_every: Every | None
    ):
        self._training, self._worker = training, worker
        self._requests, self._check_every = requests, check_every
        self._known: Numbers = {}

    def run(self) -> None:
        training, claims = self._training, claims_of(self._training.mesh)
        while training.continues:
            self._round(claims)
            training.end_epoch()

    def _round(self, claims: WorkQueue) -> None:
        self._local_sums: list[Sums] = []  # of this rank's shares since its last line
        self._waited = 0.0
        self._speed: Numbers = {}  # shared by lines that are written at once
        self._batch: Batch | None = None
        self._bad_loss: float | None = None  # a loss that is not finite
        self._done_at = time.perf_counter()  # when this rank's last share was done
        self._spent = sum(heartbeat.spent().values())  # seconds without waiting until then
        claims.begin(self._training.progress.batch, self._next_meeting())
        worker = self._worker
        worker.begin_round()
        if worker.computes:
            more = True
            while more:
                for batch in self._training.loader.read_shares(
                    self._training.progress.epoch, claims.shares()
                ):
                    self._compute(batch, claims)
                more = claims.more()
            worker.end_of_work()
        else:
            for number in worker.serve():
                self._come_to(number, claims)
                if self._training.mesh.is_main and (self._training.stopped or self._requests.wants):
                    claims.cut()
        stop = self._agree(claims)
        if stop > self._training.progress.batch:
            self._come_to(stop - 1, claims)
            worker.end_round()
            self._training.learner.after_update()
            self._count(stop - 1)
            self._pass(claims, met=True)

    def _next_meeting(self) -> int:
        """The number of global batches of this epoch after which the ranks meet next."""
        batch, step = self._training.progress.batch, self._training.progress.step
        last = min(self._training.loader.batches, batch + self._training.total_steps - step)
        for steps in range(1, last - batch):
            if self._meets_after(step + steps):
                return batch + steps
        return last

    def _meets_after(self, step: int) -> bool:
        if self._check_every is not None and self._check_every.due_at_step(step):
            return True
        return any(not callback.reads for callback in self._training.callbacks.due_at_step(step, last=False))

    def _compute(self, batch: Batch, claims: WorkQueue) -> None:
        """Computes a share that this rank has claimed, and reports it."""
        self._come_to(batch.index, claims)
        self._waited, self._batch = self._waited + batch.waited, batch
        step = self._training.progress.step + 1
        due = self._training.callbacks.due_at_step(step, step >= self._training.total_steps)
        sums = None
        if any(not micro_batch.is_dummy for micro_batch in batch.micro_batches):
            try:
                sums = self._worker.train_share(batch, any(callback.reads for callback in due))
            except TargetError as error:
                raise blame.bad_target(self._training.loader, batch.epoch, batch.index, error) from None
        now = time.perf_counter()
        # Server 0 writes the lines, and has no samples.
        if sums is not None and self._training.mesh.axes.servers:
            waiting = min(batch.waited / max(now - self._done_at, 1e-9), 1.0)
            shown = {"tokens": tokens(batch), "waiting": waiting}
            sums = {**sums, **{name: value * sums["count"] for name, value in shown.items()}}
        self._done_at = now
        if sums is not None:
            self._local_sums.append(sums)
            if not math.isfinite(sums["loss"]):
                self._bad_loss = sums["loss"]
        spent = sum(heartbeat.spent().values())
        claims.done(sums, spent - self._spent)
        self._spent = spent
        if self._bad_loss is not None or self._training.stopped or self._requests.wants:
            claims.cut()
        heartbeat.enter("data")

    def _come_to(self, batch: int, claims: WorkQueue) -> None:
        """Advances the progress to `batch`: all shares of earlier global batches are handed out. Lines that are due at
        once have one speed, measured over all their steps."""
        self._speed = {}
        for number in range(self._training.progress.batch, batch):
            self._count(number)
        while self._training.progress.batch < batch:
            self._pass(claims)
        self._speed = {}

    def _count(self, number: int) -> None:
        self._training.meter.add(self._training.loader.sampler.size(number), self._waited)
        self._waited = 0.0

    def _pass(self, claims: WorkQueue, met: bool = False) -> None:
        """Counts a step, and calls the callbacks that are due, but those that do not read only if the ranks have
        met."""
        training = self._training
        number, step = training.progress.batch, training.progress.step + 1
        due = training.callbacks.due_at_step(step, step >= training.total_steps)
        due = [callback for callback in due if met or callback.reads]
        rate, size = training.learner.optimizer.get_lr(), training.loader.sampler.size(number)
        training.learner.rate.step()
        training.progress = training.progress.advance(size)
        heartbeat.step = training.progress.step
        if met and self._check_every is not None and self._check_every.due_at_step(step):
            training.check(f"after step {step}")
        if due:
            reads = any(callback.reads for callback in due)
            numbers = self._line(number, rate, claims) if reads else {}
            moment = Moment(
                name="step", progress=training.progress, trainer=training, numbers=numbers, together=met
            )  # fmt: skip
            training.call("step", due, lambda c: c.step(moment))

    def _line(self, number: int, rate: float, claims: WorkQueue) -> Numbers:
        """The numbers of a step, as far as this rank knows them."""
        if self._training.mesh.is_main:
            numbers = claims.reported(number)
        else:
            numbers, self._local_sums = means(self._local_sums), []
        self._known = numbers or self._known
        self._speed = self._speed or self._training.meter.read(self._batch)
        speed, known = dict(self._speed), dict(self._known)
        if length := known.pop("tokens", 0.0):
            speed["tokens_per_second"] = speed["samples_per_second"] * length
        return {**known, "lr": rate, **speed, **({"waiting": known["waiting"]} if "waiting" in known else {})}

    def _agree(self, claims: WorkQueue) -> int:
        """Returns the batch at which the round stopped, and sets whether and why the training is to stop. Raises
        NotFiniteError if a loss was not finite. Collective; the same on every rank."""
        heartbeat.enter("exchange")
        rows = self._training.mesh.gather([claims.end(), self._training.stopped, self._bad_loss])
        stop: int = rows[0][0]
        step = self._training.progress.step + stop - self._training.progress.batch
        for _, _, bad_loss in rows:
            if bad_loss is not None:
                self._training.soundness.refuse_loss(bad_loss, step, self._bad_loss)
        self._training.stopped = next((why for _, why, _ in rows if why), None)
        why = self._requests.agreed()
        self._training.interrupted = (
            None if self._training.stopped or step >= self._training.total_steps else why
        )
        return stop
