"""Supervises one launcher and its ranks until no process is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from paddle_dp.errors import StoppedError
from paddle_dp.kernel_kills import KernelKills
from paddle_dp.launch import logs, processes, stacks
from paddle_dp.launch.command import LaunchPlan
from paddle_dp.launch.console import write
from paddle_dp.launch.failures import Failure, first, read_all
from paddle_dp.launch.lost import LostRanks
from paddle_dp.launch.processes import REPEATED, Signals, is_stopped, kill_all, marked, send
from paddle_dp.launch.rank_monitor import Departure, RankMonitor, Started
from paddle_dp.launch.standstill import STATUS, Standstill, StandstillDetector, location_of
from paddle_dp.mesh.heartbeat import RankStatus, StatusTable
from paddle_dp.mesh.late_ranks import WAITED

MARK = "PADDLE_DP_JOB"  # variable in the environment of every process of a job, to find orphans
INTERVAL = 0.1  # seconds between two checks
SETTLE = 1.5  # seconds for other ranks to write their failures, before the cause is chosen
KILLED_SETTLE = 0.2  # the same where a rank was killed and the job starts again
LAUNCHER_PATIENCE = 0.5  # seconds for the launcher to log a rank's exit code that only it has seen
ALONE = 60.0  # seconds that ranks of a script continue without one of them, until a line reports it
GRACE = 5.0  # seconds for ranks to end by themselves after SIGTERM


@dataclass(frozen=True, kw_only=True)
class ExternalEvents:
    """Requests from outside the ranks: signals to this process, and requests of the rendezvous.

    `must_end()`: the job must end at once. `must_stop()`: a line if its ranks must stop in good order, or "".
    `notify_nodes(text)` prints a text on the other nodes' screens.
    """

    signals: Signals
    must_end: Callable[[], bool] = lambda: False
    must_stop: Callable[[], str] = lambda: ""
    notify_nodes: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job has ended, and its exit status.

    `cause`: the failure, or the stop that it was asked for (`StoppedError`); `consequences`: later failures, in order
    of time. Without a cause all ranks have ended well, a signal to this process, number `status` - 128, has ended them
    at once, or Paddle's launcher has ended by itself with `status`.
    """

    status: int = 0
    cause: Failure | None = None
    consequences: Sequence[Failure] = ()


class Supervision:
    """Waits for a job that `process` started; its ranks write to `attempt` and have `mark` in their environment.

    Every check looks at `outside`, too. A signal n to this process ends the job:

    | when                                   | the ranks get              | checkpoint             | exit status |
    |----------------------------------------|----------------------------|------------------------|-------------|
    | all ranks train                        | n: they stop in good order | by `checkpoint` if any | 75          |
    | before that, or a rank has no training | SIGTERM, and `GRACE`       | none                   | 128 + n     |
    | a second time (`Signals`)              | SIGKILL                    | none                   | 128 + n     |
    """

    def __init__(
        self,
        plan: LaunchPlan,
        process: Started,
        attempt: Path,
        mark: str,
        outside: ExternalEvents,
        board: StatusTable | None = None,
    ):
        self.plan, self.process, self.attempt, self.mark = plan, process, attempt, mark
        self.outside, self.board = outside, board
        self.detector = StandstillDetector(plan.limits, plan.nodes) if board and plan.limits else None
        self.standstill: Standstill | None = None
        self.steps: dict[int, int] = {}  # updates done by each rank of this node, set at the end
        self.monitor = RankMonitor(process.ranks)
        self.kernel = KernelKills()
        self.first_rank = plan.numbers.start
        self._reported_departures = False
        self._is_stop_sent = False  # the ranks have a signal after which they stop in good order
        self._shown = 0  # bytes of the first rank's log that are on the screen
        self.lost = LostRanks(self.monitor, self._beat, plan.nodes > 1, outside.notify_nodes)

    def wait(self, follower: logs.Follower) -> JobEnd:
        """Returns how the job has ended. Afterwards none of its processes is left."""
        signals = self.outside.signals
        patience, times = 0.0, 0
        job_end: JobEnd | None = None
        try:
            self._wait_until_over(follower)
            # A signal that comes from now on, also while the ranks get theirs, is another one.
            times = signals.times
            if self._ends_at_once(times):
                patience = 0.0 if self._is_stop_sent or times > 1 else GRACE
                return JobEnd(status=128 + signals.number)
            self._shown = follower.shown
            job_end = self._job_end()
            if job_end.cause is None:
                self.lost.tell_all()
            patience, times = GRACE if self._ends_in_order() else 0.0, signals.times
            return job_end
        finally:
            self._end(patience, times)
            self.steps = {rank: beat.step for rank in self.plan.numbers if (beat := self._beat(rank))}
            failed = job_end is not None and job_end.cause is not None
            follower.copy(self._size_before_failure()) if failed else follower.finish()

    def _wait_until_over(self, follower: logs.Follower) -> None:
        """Copies the first rank's output until the job is over or a signal ends it; passes on a request to stop."""
        signals, written = self.outside.signals, follower.size
        while not self._over():
            if not self._is_stop_sent and (line := self._request_line()) and self._can_all_stop():
                self._is_stop_sent = True
                if not self._have_agreed_to_stop():  # they inform other nodes' ranks
                    send(self.monitor.living, signals.number or signal.SIGUSR1)
                write(line)
            if self._ends_at_once(signals.times):
                return
            follower.follow(written)  # the size from before the check: nothing printed after a failure
            self.monitor.rest(INTERVAL)
            written = follower.size

    def _ends_at_once(self, times: int) -> bool:
        """True if so many signals end the job without patience: the first one asks the ranks to stop, or asks for what
        they do already, as it may come to each node at another time."""
        return times > (1 if self._is_stop_sent or self._have_agreed_to_stop() else 0)

    def _over(self) -> bool:
        """True if all ranks ended well, the launcher is gone, a rank failed or stands still, or the job must end."""
        self.monitor.look()
        self.kernel.look(time.monotonic())
        self._report_departures(time.time())
        lost = self.lost.now()
        self.lost.tell(self._failure_of)
        early = self._left_early()
        well = self.monitor.all_well(self.plan.ranks, lost) and not early
        # A launcher of several nodes may have to answer other nodes' launchers; a stopped one does not, and never ends.
        return (
            (well and (self.plan.nodes == 1 or is_stopped(self.process.pid)))
            or self.process.poll() is not None
            or any(departure.rank not in lost for departure in self.monitor.failed)
            or bool(self.lost.written(self.attempt))
            or bool(early)
            or self.outside.must_end()
            or self._stands_still()
        )

    def _failure_of(self, rank: int) -> Failure:
        """Returns the failure of a rank that has ended."""
        written = {failure.rank: failure for failure in read_all(self.attempt)}
        return written.get(rank) or self._departure_failure(self.monitor.departures[rank])

    def _report_departures(self, now: float) -> None:
        """Prints once which ranks of a script have ended well while others have continued for long.

        The others may wait for them for ever, or not: the supervisor cannot tell.
        """
        ended_well = [d for d in self.monitor.departures.values() if not d.failed]
        gone = [departure.rank for departure in ended_well if now > departure.time + ALONE]
        if self._reported_departures or not gone or not self.plan.job.script or not self.monitor.living:
            return
        self._reported_departures = True
        left = ", ".join(str(rank) for rank in sorted(gone))
        on = ", ".join(str(rank) for rank in sorted(self.monitor.pids) if rank not in self.monitor.departures)
        write(
            f"rank {left} has ended with exit status 0, and rank {on} has gone on for {ALONE:.0f} s without it. If it "
            "waits for that one, it waits for ever: end the job by Ctrl-C."
        )

    def _can_all_stop(self) -> bool:
        """True if each rank of this node is in a training that can stop in good order, or will."""
        beats = self.beats.values()
        return self.board is not None and all(beat and (beat.can_stop or beat.will_stop) for beat in beats)

    def _have_agreed_to_stop(self) -> bool:
        """True if the ranks have agreed to stop in good order, also after they have ended."""
        return any(beat is not None and beat.will_stop for beat in map(self._beat, self.plan.numbers))

    def _request_line(self) -> str:
        """Returns the line on the request to stop in good order: a signal's, or one from outside; "" without one."""
        name = self.outside.signals.name
        again = "once more" if name == "SIGINT" else f"once more after {REPEATED:.0f} s"
        stopping = f"{name}: stopping after one of the next updates, with a checkpoint ({again}: at once)"
        return stopping if name else self.outside.must_stop()

    def _stands_still(self) -> bool:
        """True if no rank of this node has given a sign of life for too long."""
        if self.detector is not None:
            pids = self.monitor.pids
            stopped = [rank for rank in self.beats if rank in pids and is_stopped(pids[rank])]
            self.standstill = self.detector.look(self.beats, time.monotonic(), stopped)
        return self.standstill is not None

    @property
    def beats(self) -> dict[int, RankStatus | None]:
        """The heartbeat of each rank of this node that has not ended; None before a rank's first."""
        return {rank: self._beat(rank) for rank in self.plan.numbers if rank not in self.monitor.departures}

    def _beat(self, rank: int) -> RankStatus | None:
        """Returns the last heartbeat of a rank of this node; None before its first, and without a board."""
        return None if self.board is None else self.board.read(rank - self.first_rank)

    def _job_end(self) -> JobEnd:
        if self.standstill is not None:
            return JobEnd(status=STATUS, cause=self._stood_still(self.standstill))
        self._await_ranks(self.outside.signals.times, self._settle())
        return self._failed() or JobEnd(status=(self.process.poll() or 0) % 256)

    def _await_ranks(self, times: int, seconds: float) -> None:
        """Returns when no rank lives, at a signal after the first `times`, or after `seconds`."""
        end = time.monotonic() + seconds
        while self.monitor.living and self.outside.signals.times == times and time.monotonic() < end:
            self.monitor.rest(INTERVAL)
            self.monitor.look()

    def _settle(self) -> float:
        """Returns the seconds that other ranks have for writing their failures. A killed rank is the cause, whatever
        they write afterwards, and where the job starts again each second of theirs is one without a training."""
        killed = any(departure.code == -signal.SIGKILL for departure in self.monitor.failed)
        return KILLED_SETTLE if killed and self.plan.job.restarts else SETTLE

    def _failed(self) -> JobEnd | None:
        """Returns the first cause, from the failures that ranks have written and from their exit codes."""
        if (status := self.process.poll()) is not None and status < 0:
            launcher = self._launcher_failure(-status)
            return JobEnd(status=launcher.exit_status, cause=launcher)
        lost = self.lost.now()
        failures = [failure for failure in read_all(self.attempt) if failure.rank not in lost]
        wrote = {failure.rank for failure in failures}
        ended = [*(d for d in self.monitor.failed if d.rank not in lost), *self._left_early()]
        failures += [self._departure_failure(departure) for departure in ended if departure.rank not in wrote]
        if (cause := first(failures)) is None:
            return None
        if cause.consequence and self.board is None:
            # Ranks that left with 0, or with a code that only the launcher saw; the others are among `failures`.
            gone = self.monitor.departures.values()
            left = [d for d in gone if not d.failed and d.time < cause.time + SETTLE]
            cause = self._departure_failure(left[0]) if left else cause
        consequences = sorted((f for f in failures if f is not cause), key=lambda failure: failure.time)
        return JobEnd(status=cause.exit_status, cause=cause, consequences=consequences)

    def _left_early(self) -> list[Departure]:
        """Returns ranks that left before their work was done, with 0 or a code that only the launcher saw."""
        if self.board is None:
            return []
        gone, lost = self.monitor.departures.values(), self.lost.now()
        return [d for d in gone if not d.failed and not self._is_done(d.rank) and d.rank not in lost]

    def _is_done(self, rank: int) -> bool:
        beat = self._beat(rank)
        if self.plan.job.script and (beat is None or beat.phase == "unwatched"):
            return True  # it may leave by os._exit
        return beat is not None and beat.phase == "done"

    def _launcher_failure(self, number: int) -> Failure:
        """Makes the failure of Paddle's launcher after a signal, which ends its ranks, too."""
        ended = Failure.by_signal(self.first_rank, self.process.pid, number, time.time())
        ended = ended.with_kernel(self.kernel.lately())
        message = (
            f"Paddle's launcher (process {self.process.pid}) was {ended.message}; its ranks ended with it."
        )
        return replace(ended, kind="launcher", message=message, expected=True)

    def _stood_still(self, hang: Standstill) -> Failure:
        """Makes the failure of a job that stands still, with the stacks of the ranks that the others wait for."""
        rank, message, pids = hang.blocking_ranks[0], str(hang), self.monitor.pids
        if not pids:
            message = nobody_came(self.plan, hang.seconds, self.attempt)
        else:
            begun = {r: pids[r] for r, beat in hang.beats.items() if beat and r in pids}
            stack_of = stacks.collect(self.attempt, begun)
            blocking = [r for r in hang.blocking_ranks[:2] if r in stack_of]
            for r in blocking:
                message += f"\nrank {r}, the innermost call first:\n{stacks.shown(stack_of[r])}"
            rest = [f"rank {r}: {stacks.innermost(stack_of[r])}" for r in stack_of if r not in blocking]
            message = "\n".join([message, *rest, f"stacks of all ranks: {self.attempt}/stacks.rank-*"])
        return Failure(
            rank=rank, kind="stood still", message=message, exit_status=STATUS, expected=True,
            pid=pids.get(rank, self.process.pid),
        )  # fmt: skip

    def _departure_failure(self, departure: Departure) -> Failure:
        """Makes the failure of a rank that wrote none."""
        shown = self._shown if departure.rank == self.first_rank else 0
        log = logs.tail(self.log_of(departure.rank), since=shown)
        known_code = self._code_of(departure)
        code, rank, pid = known_code or 0, departure.rank, departure.pid
        beat = self._beat(rank)
        name = "" if beat is None else beat.name
        location = "" if beat is None or beat.phase in ("done", "unwatched") else f" in {location_of(beat)}"
        if code < 0:
            ended = replace(Failure.by_signal(rank, pid, -code, departure.time, log, location), name=name)
            ended = ended.with_kernel(self.kernel.lately())
            # DataParallel exchanges in C++, whose time limit kills the process: only its log names the late rank.
            return replace(ended, waited=logs.last(self.log_of(rank), WAITED)) if ended.consequence else ended
        status = "an unknown exit status" if known_code is None else f"exit status {code}"
        message = f"left with {status} while the job was running{location and f',{location}'}"
        return Failure(
            rank=rank, pid=pid, name=name, kind="left", message=message, exit_status=code or 1, traceback=log,
            time=departure.time,
        )  # fmt: skip

    def _code_of(self, departure: Departure) -> int | None:
        """Returns a rank's exit code; from the launcher's log if the launcher has waited for the rank first."""
        end = time.monotonic() + LAUNCHER_PATIENCE
        code = departure.code
        while code is None and self.process.poll() is None and time.monotonic() < end:
            code = logs.exit_code(self.attempt, departure.rank - self.first_rank)
            time.sleep(0.02)
        return code

    def _size_before_failure(self) -> int:
        """Returns the bytes of the first rank's log before its failure, which is shown afterwards."""
        return max((end.printed for end in read_all(self.attempt) if end.rank == self.first_rank), default=0)

    def log_of(self, rank: int) -> Path:
        return logs.rank_log(self.attempt, rank - self.first_rank)

    def _end(self, patience: float, times: int) -> None:
        """Sends SIGTERM to the ranks and waits for `patience` seconds, or a signal after the first `times`; then kills
        everything.

        Only ranks get SIGTERM: a loader's processes must live until their rank has finished its work.
        """
        if patience and self.outside.signals.number and not self._ends_in_order():
            send(self.monitor.living, signal.SIGTERM)
        self._await_ranks(times, patience)
        known_pids = set(self.monitor.pids.values())

        def left() -> list[int]:
            pids = [*self.process.left(), *marked(MARK, self.mark)]
            known_pids.update(pids)
            return pids

        kill_all(left)
        self.process.wait()
        processes.remove_shared_memory(known_pids)
        self.monitor.close()

    def _ends_in_order(self) -> bool:
        """True if the ranks end by themselves, as they were asked to."""
        return any(failure.kind == StoppedError.__name__ for failure in read_all(self.attempt))


@contextmanager
def board_of(plan: LaunchPlan) -> Iterator[StatusTable | None]:
    """Yields the table of the ranks' heartbeats; None for a job without a watch, or if there is no memory for it."""
    board = None
    if plan.limits is not None:
        try:
            board = StatusTable(plan.ranks)
        except OSError as error:
            print(f"a job that stands still will not be noticed: {error}", flush=True)
    with closing(board) if board is not None else nullcontext():
        yield board


def nobody_came(plan: LaunchPlan, seconds: float, attempt: Path) -> str:
    """Returns the message for a launcher that has started no rank for `seconds`."""
    cause = "."
    if plan.nodes > 1:
        cause = (
            ": all nodes have joined, but Paddle's launchers have not found each other. Can the nodes reach each "
            "other at all ports, not only at --master's?"
        )
    standstill = f"no rank of this node has started for {seconds:.0f} s (watch.start){cause}"
    return f"{standstill} Output of Paddle's launcher: {attempt / 'launcher.log'}"
