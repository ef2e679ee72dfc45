"""Asynchronous training loop: between two meetings each rank processes as many shares as it can.

A step is one global batch. Within a round ranks claim shares of global batches, in order (`WorkQueue`), so a slow rank
computes fewer, and each sample of an epoch is learned exactly once. Within a round a rank's progress counts global
batches that have been handed out entirely; at a meeting these are done. The ranks meet when the training needs one
state: when a callback that does not read is due (an evaluation, a checkpoint), when weights are checked, at the end of
an epoch and of the training, and when a rank was asked to stop.

Callbacks that read are called on each rank when its progress passes their step. On the main rank their numbers are
means over the shares of this and earlier steps reported until then; on other ranks, over the rank's shares. Without new
shares they are the last known numbers. Before a rank knows any, its callbacks are not called; where the ranks have met,
it gets the main rank's, as a second server does, which computes no share. Callbacks may do collective work only when
the ranks have met (`Moment.together`).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from paddle_dp.data import Batch
from paddle_dp.errors import LostPeerError, TargetError
from paddle_dp.learner.learner import AsyncRank
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.mesh import MAIN_RANK
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.mesh.transport import Patience
from paddle_dp.train import blame
from paddle_dp.train.ledger import Assignments, Share, Sums, means
from paddle_dp.train.meter import tokens
from paddle_dp.train.stopping import StopRequests
from paddle_dp.train.training_state import TrainingState
from paddle_dp.units import Every

# Ranks that do not wait for each other ask rank 0 which share of a global batch to compute next -----------------------


class WorkQueue:
    """A rank's claims to shares, round after round. Rank 0 keeps the ledger: the threads that read its sockets answer
    while it computes.

    A rank claims its next share when it gets one, so that it does not wait for the answer. If ranks may be lost, it
    claims the next one when it has computed one: then a slow or dead rank never holds two.
    """

    def __init__(self, mesh: Mesh):
        """Use `work_queue_of`: a process has one queue, so that no message of a later training is lost."""
        self.mesh, self.round = mesh, 0
        self._lock = threading.Condition()
        self._ledger: Assignments | None = None
        # Messages of rounds that this rank has not begun.
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._local_shares: deque[Share] = deque()
        self._pace: dict[int, float] = {}  # seconds per share by rank, on rank 0
        self._resting: deque[int] = deque()  # ranks that have computed all that they claimed
        if mesh.ranks > 1 and mesh.is_main:
            transport.endpoint().answer(CHANNELS["claims"], self._on_message)
            transport.endpoint().when_gone("claims", self.gone)

    def begin(self, first: int, stop: int) -> None:
        """Begins a round over the global batches `first` to `stop` - 1 of an epoch; the same on every rank."""
        self.round += 1
        self._local_shares.clear()  # of a round that failed
        if self.mesh.is_main:
            with self._lock:
                if self._ledger is not None:
                    self._pace = self._ledger.known_pace()
                self._ledger = Assignments(first, stop, self.mesh.dp_size, self._pace)
                early, self._early = self._early, []
                for rank, message in early:
                    self._hear(rank, message)

    def shares(self) -> Iterator[Share]:
        """Yields this rank's shares of the round, claiming them as it goes."""
        if self.mesh.is_main:
            while (share := self._with(lambda ledger: ledger.claim(MAIN_RANK))) is not None:
                self._local_shares.append(share)
                yield share
            return
        later = bool(self.mesh.expendable)  # rank 0 computes nothing, and answers at once
        self._send({"do": "claim"})
        while (answer := json.loads(bytes(self._granted()))) is not None:
            share = (int(answer[0]), int(answer[1]))
            if not later:
                self._send({"do": "claim"})
            self._local_shares.append(share)
            yield share
            if later:
                self._send({"do": "claim"})

    def done(self, sums: Sums | None, seconds: float) -> None:
        """Reports the oldest claimed share as computed; `seconds`: its time here, without waiting for others."""
        share = self._local_shares.popleft()
        if self.mesh.is_main:
            self._with(lambda ledger: ledger.done(MAIN_RANK, share, sums, seconds))
        else:
            self._send({"do": "done", "share": share, "sums": sums, "seconds": seconds})

    def more(self) -> bool:
        """Call it when this rank has no shares left. Waits until the others have none left, or are gone. True if shares
        of a lost rank are available; always False, at once, if no rank may be lost."""
        if not self.mesh.expendable:
            return False
        self._send({"do": "rest"})
        with heartbeat.waiting("the shares that other ranks compute"):
            return bool(json.loads(bytes(self._granted())))

    def cut(self) -> None:
        """Lets this round begin no further global batch."""
        if self.mesh.is_main:
            self._with(Assignments.cut)
        else:
            self._send({"do": "cut"})

    def gone(self, rank: int) -> None:
        """Hands a lost rank's unfinished shares out again, if the others continue without it. For rank 0."""
        with self._lock:
            if self._ledger is not None and rank in self.mesh.expendable:
                self._ledger.gone(rank)
                self._wake()

    def reported(self, batch: int) -> dict[str, float]:
        """The means over the shares up to this global batch that were done since the last call. For rank 0."""
        return self._with(lambda ledger: ledger.reported(batch))

    def end(self) -> int:
        """Ends the round when this rank finds no share. Rank 0 waits for the shares that others compute and returns the
        batch at which the round stopped; other ranks return 0. Raises LostPeerError after train.patience."""
        if not self.mesh.is_main:
            return 0
        with self._lock, heartbeat.waiting("the shares that other ranks compute"):
            ledger = self._ledger
            assert ledger is not None, "a round was begun"
            if not self._lock.wait_for(lambda: ledger.is_done, timeout=Patience.seconds):
                raise LostPeerError(
                    f"rank 0 has waited {Patience.seconds:g} s for shares that other ranks have claimed and not "
                    "computed (train.patience). See their logs."
                )
            return ledger.stop

    def _with(self, do: Callable[[Assignments], Any]) -> Any:
        with self._lock:
            assert self._ledger is not None, "a round was begun"
            result = do(self._ledger)
            self._wake()
            return result

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps({**message, "round": self.round}).encode()
        transport.endpoint().send(CHANNELS["claims"], MAIN_RANK, memoryview(data))

    def _granted(self) -> bytearray:
        return transport.endpoint().receive(CHANNELS["granted"], MAIN_RANK)

    def _on_message(self, rank: int, data: bytearray) -> None:
        """Takes a message on rank 0, in a thread that reads a socket."""
        message = json.loads(bytes(data))
        with self._lock:
            if message["round"] > self.round:
                self._early.append((rank, message))
            elif message["round"] == self.round:
                self._hear(rank, message)

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        ledger = self._ledger
        assert ledger is not None, "a round was begun"
        if message["do"] == "claim":
            answer = json.dumps(ledger.claim(rank)).encode()
            transport.endpoint().send(CHANNELS["granted"], rank, memoryview(answer))
        elif message["do"] == "done":
            ledger.done(rank, (message["share"][0], message["share"][1]), message["sums"], message["seconds"])
        elif message["do"] == "rest":
            self._resting.append(rank)
        else:
            ledger.cut()
        self._wake()

    def _wake(self) -> None:
        """Wakes those that wait for a change of the ledger, here and on resting ranks."""
        ledger = self._ledger
        assert ledger is not None, "a round was begun"
        while self._resting and (ledger.is_done or ledger.has_more):
            answer = memoryview(json.dumps(not ledger.is_done).encode())
            transport.endpoint().send(CHANNELS["granted"], self._resting.popleft(), answer)
        self._lock.notify_all()


_work_queues: list[WorkQueue] = []


def work_queue_of(mesh: Mesh) -> WorkQueue:
    """This process's work queue, made on first use."""
    if not _work_queues or _work_queues[0].mesh != mesh:
        _work_queues[:] = [WorkQueue(mesh)]
    return _work_queues[0]


Numbers = dict[str, float]


class RoundDriver:
    """Trains until the end in rounds, in which `async_rank` computes shares or serves those that do. `check_every`: how
    often the ranks meet to compare weights; `requests`: to stop the training."""

    def __init__(
        self,
        training: TrainingState,
        async_rank: AsyncRank,
        requests: StopRequests,
        check_every: Every | None,
    ):
        self._training, self._async_rank = training, async_rank
        self._requests, self._check_every = requests, check_every
        self._known: Numbers = {}

    def run(self) -> None:
        training, work_queue = self._training, work_queue_of(self._training.mesh)
        with training.learner.training():
            while training.continues:
                training.check_order()
                self._round(work_queue)
                training.end_epoch()

    def _round(self, work_queue: WorkQueue) -> None:
        self._local_sums: list[Sums] = []  # of this rank's shares since its last line
        self._waited = 0.0
        self._speed: Numbers = {}  # shared by lines that are written at once
        self._batch: Batch | None = None
        self._bad_loss: float | None = None  # a loss that is not finite
        self._done_at = time.perf_counter()  # when this rank's last share was done
        self._spent = sum(heartbeat.spent().values())  # seconds without waiting until then
        work_queue.begin(self._training.progress.batch, self._next_meeting())
        async_rank = self._async_rank
        async_rank.begin_round()
        if async_rank.computes:
            more = True
            while more:
                for batch in self._training.loader.read_shares(
                    self._training.progress.epoch, work_queue.shares()
                ):
                    self._compute(batch, work_queue)
                more = work_queue.more()
            async_rank.end_of_work()
        else:
            for number in async_rank.serve():
                self._come_to(number, work_queue)
                if self._training.mesh.is_main and (self._training.early_end or self._requests.wants):
                    work_queue.cut()
        stop = self._agree(work_queue)
        if stop > self._training.progress.batch:
            self._come_to(stop - 1, work_queue)
            async_rank.end_round()
            self._training.learner.after_update()
            self._count(stop - 1)
            self._pass(work_queue, met=True)

    def _next_meeting(self) -> int:
        """The number of global batches of this epoch after which the ranks meet next."""
        batch, step = self._training.progress.batch, self._training.progress.step
        batches = self._training.loader.sampler.batches_of(self._training.progress.epoch)
        last = min(batches, batch + self._training.total_steps - step)
        for steps in range(1, last - batch):
            if self._meets_after(step + steps):
                return batch + steps
        return last

    def _meets_after(self, step: int) -> bool:
        if self._check_every is not None and self._check_every.due_at_step(step):
            return True
        return any(not callback.reads for callback in self._training.callbacks.due_at_step(step, last=False))

    def _compute(self, batch: Batch, work_queue: WorkQueue) -> None:
        """Computes a share that this rank has claimed, and reports it."""
        self._come_to(batch.index, work_queue)
        self._waited, self._batch = self._waited + batch.waited, batch
        step = self._training.progress.step + 1
        due = self._training.callbacks.due_at_step(step, step >= self._training.total_steps)
        sums = None
        if any(not micro_batch.is_dummy for micro_batch in batch.micro_batches):
            try:
                sums = self._async_rank.train_share(batch, any(callback.reads for callback in due))
            except TargetError as error:
                raise blame.bad_target(self._training.loader, batch.epoch, batch.index, error) from None
        now = time.perf_counter()
        # Server 0 writes the lines, and has no samples.
        if sums is not None and not self._training.mesh.axes.reads(0):
            waiting = min(batch.waited / max(now - self._done_at, 1e-9), 1.0)
            shown = {"tokens": tokens(batch), "waiting": waiting}
            sums = {**sums, **{name: value * sums["count"] for name, value in shown.items()}}
        self._done_at = now
        if sums is not None:
            self._local_sums.append(sums)
            if not math.isfinite(sums["loss"]):
                self._bad_loss = sums["loss"]
        spent = sum(heartbeat.spent().values())
        work_queue.done(sums, spent - self._spent)
        self._spent = spent
        if self._bad_loss is not None or self._training.early_end or self._requests.wants:
            work_queue.cut()
        heartbeat.enter("data")

    def _come_to(self, batch: int, work_queue: WorkQueue) -> None:
        """Advances the progress to `batch`: all shares of earlier global batches are handed out. Lines that are due at
        once have one speed, measured over all their steps."""
        self._speed = {}
        for number in range(self._training.progress.batch, batch):
            self._count(number)
        while self._training.progress.batch < batch:
            self._pass(work_queue)
        self._speed = {}

    def _count(self, number: int) -> None:
        size = self._training.loader.sampler.size(number, self._training.progress.epoch)
        self._training.meter.add(size, self._waited)
        self._waited = 0.0

    def _pass(self, work_queue: WorkQueue, met: bool = False) -> None:
        """Counts a step, and calls the callbacks that are due, but those that do not read only if the ranks have
        met."""
        training = self._training
        number, step = training.progress.batch, training.progress.step + 1
        due = training.callbacks.due_at_step(step, step >= training.total_steps)
        due = [callback for callback in due if met or callback.reads]
        rate = training.learner.optimizer.get_lr()
        size = training.loader.sampler.size(number, training.progress.epoch)
        training.learner.rate.step()
        training.progress = training.progress.advance(size)
        heartbeat.step = training.progress.step
        if met and self._check_every is not None and self._check_every.due_at_step(step):
            training.check(f"after step {step}")
        reads = any(callback.reads for callback in due)
        numbers = self._line(number, rate, work_queue, met) if reads else {}
        # Without a target that counts there is no loss where they have met, either.
        if due and (met or numbers):
            training.call(replace(training.moment("step"), numbers=numbers, together=met), due)

    def _line(self, number: int, rate: float, work_queue: WorkQueue, met: bool) -> Numbers:
        """The numbers of a step; {} while this rank knows none. Collective if the ranks have met: a rank without a new
        share gets the main rank's then."""
        if self._training.mesh.is_main:
            numbers = work_queue.reported(number)
        else:
            numbers, self._local_sums = means(self._local_sums), []
        main_numbers: Numbers = {}
        if met:
            main_numbers = self._training.mesh.gather(numbers or self._known)[MAIN_RANK]
        self._known = numbers or main_numbers or self._known
        if not (self._known or met):
            return {}
        self._speed = self._speed or self._training.meter.read(self._batch)
        speed, known = dict(self._speed), dict(self._known)
        if length := known.pop("tokens", 0.0):
            speed["tokens_per_second"] = speed["samples_per_second"] * length
        return {**known, "lr": rate, **speed, **({"waiting": known["waiting"]} if "waiting" in known else {})}

    def _agree(self, work_queue: WorkQueue) -> int:
        """Returns the batch at which the round stopped, and sets whether and why the training is to stop. Raises
        NotFiniteError if a loss was not finite. Collective; the same on every rank."""
        heartbeat.enter("exchange")
        rows = self._training.mesh.gather([work_queue.end(), self._training.early_end, self._bad_loss])
        stop: int = rows[0][0]
        step = self._training.progress.step + stop - self._training.progress.batch
        for _, _, bad_loss in rows:
            if bad_loss is not None:
                self._training.soundness.refuse_loss(bad_loss, step, self._bad_loss)
        self._training.early_end = next((why for _, why, _ in rows if why), None)
        why = self._requests.agreed()
        self._training.interrupted = (
            None if self._training.early_end or step >= self._training.total_steps else why
        )
        return stop
