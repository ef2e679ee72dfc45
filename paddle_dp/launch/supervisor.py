"""One launcher and its ranks under watch, from the first process to the last."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from paddle_dp.launch import logs
from paddle_dp.launch.command import Plan
from paddle_dp.launch.failures import Failure, first, read_all
from paddle_dp.launch.processes import alive, descendants, kill_all, marked, send
from paddle_dp.launch.signals import Signals
from paddle_dp.launch.watch import Departure, Watch
from paddle_dp.mesh.late_ranks import WAITED

MARK = "PADDLE_DP_JOB"  # in the environment of every process of a job: how they are found when their parents are gone
LOOK = 0.1  # seconds between two looks
ECHO = 1.5  # seconds in which the others may still say why they failed, before the cause is chosen
GRACE = 5.0  # seconds for ranks to end by themselves when told to


class Supervision:
    """Waits for a job whose launcher is `process`; its ranks write to `attempt`, and carry `mark`.

    `stalled` is asked at every look: a job that it says is stuck is ended.
    """

    def __init__(
        self,
        plan: Plan,
        process: Popen[bytes],
        attempt: Path,
        mark: str,
        stalled: Callable[[], bool] = lambda: False,
    ):
        self.plan, self.process, self.attempt, self.mark = plan, process, attempt, mark
        self.stalled = stalled
        self.watch = Watch(process.pid)
        self.first_rank = (plan.job.node_rank or 0) * plan.ranks

    def wait(self, told: Signals, follower: logs.Follower) -> Failure | int:
        """The job's exit status, or the failure that ended it. Afterwards none of its processes is left."""
        patience, failed = 0.0, False
        try:
            written = follower.size
            while not (told.number or self._over()):
                follower.copy(written)  # what was there before the look: never past a failure
                self.watch.rest(LOOK)
                written = follower.size
            if told.number:
                patience = GRACE
                return 128 + told.number
            outcome = self._outcome(told)
            failed = isinstance(outcome, Failure)
            return outcome
        finally:
            self._end(told, patience)
            follower.copy(self._said_before_failing()) if failed else follower.finish()

    def _over(self) -> bool:
        """Whether all has ended well, the launcher is gone, or a rank has failed."""
        self.watch.look()
        done = self.plan.nodes == 1 and self.watch.all_well(self.plan.ranks)
        return (
            done
            or self.process.poll() is not None
            or bool(self.watch.failed)
            or bool(read_all(self.attempt))
            or self.stalled()
        )

    def _outcome(self, told: Signals) -> Failure | int:
        end = time.monotonic() + ECHO
        while self.watch.living and not told.number and time.monotonic() < end:
            self.watch.rest(LOOK)
            self.watch.look()
        cause = self._cause()
        if cause is not None:
            return cause
        return 0 if self.process.poll() is None else self.process.returncode % 256

    def _cause(self) -> Failure | None:
        """The first cause among what ranks have written and how they have ended."""
        found = read_all(self.attempt)
        wrote = {failure.rank for failure in found}
        found += [self._of(departure) for departure in self.watch.failed if departure.rank not in wrote]
        cause = first(found)
        if cause is not None and cause.consequence:
            for departure in self.watch.departures.values():
                # None: the launcher, which looks more rarely, was there first for once. Other codes are in `found`.
                if departure.code in (0, None) and departure.time < cause.time + ECHO:
                    return self._of(departure)
        return cause

    def _of(self, departure: Departure) -> Failure:
        """A rank that ended without a word of its own."""
        log = logs.tail(self.log_of(departure.rank))
        code, rank, pid = departure.code or 0, departure.rank, departure.pid
        if code < 0:
            ended = Failure.by_signal(rank, pid, -code, departure.time, log)
            # DataParallel exchanges in C++, whose time limit ends the process: only its log knows for whom it waited.
            return replace(ended, waited=logs.last(self.log_of(rank), WAITED)) if ended.consequence else ended
        status = "an exit status that nobody saw" if departure.code is None else f"exit status {code}"
        message = f"left with {status} while the job was at work"
        return Failure(
            rank=rank,
            pid=pid,
            kind="left",
            message=message,
            exit_status=code or 1,
            traceback=log,
            time=departure.time,
        )

    def _said_before_failing(self) -> int:
        """How much of the first rank's log is its own words, and not the echo of a failure that is shown after it."""
        return max((end.printed for end in read_all(self.attempt) if end.rank == self.first_rank), default=0)

    def log_of(self, rank: int) -> Path:
        return logs.worker_log(self.attempt, rank - self.first_rank)

    def _end(self, told: Signals, patience: float) -> None:
        """Ranks are told to end and given `patience` (a second signal ends it); then everything goes at once.

        Only the ranks are told: a loader's processes must not go before their rank has put its work away.
        """
        if patience:
            send(self.watch.living, signal.SIGTERM)
        times, end = told.times, time.monotonic() + patience
        while self.watch.living and told.times == times and time.monotonic() < end:
            self.watch.rest(LOOK)
            self.watch.look()
        kill_all(self._left)
        self.process.wait()
        self.watch.close()

    def _left(self) -> list[int]:
        launcher = self.process.pid
        family = descendants(launcher) if self.process.poll() is None else []
        return [*family, *filter(alive, [launcher]), *marked(MARK, self.mark)]
