"""Names the ranks that are late to an exchange, so that the error of a waiting rank names the one it waits for.

Each rank counts the exchanges that it has entered, by group. If its counts have not changed for a while, because it
waits, computes for long or sleeps, a thread writes them into the job's store, with its step and phase. A rank that has
waited longer than `notice` reads the others' counts there; ranks with lower counts are late. A stopped rank writes
nothing, and its last counts are too low.

`waiting` also tells the heartbeat, from which a standstill's names and the waits of measured steps (`paddle-dp why`)
come.
"""

from __future__ import annotations

import atexit
import glob
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.secret import JobStore, job_store
from paddle_dp.text import numbered

Counts = dict[str, int]


@dataclass
class Wait:
    """An exchange that this rank has entered: its group, members and name, its start, and the late ranks with their
    phase, if it is known."""

    group: str
    members: Sequence[int]
    activity: str
    since: float
    late: tuple[int, ...] = ()
    phase: str = ""
    reported: float = 0.0  # seconds that this rank had waited when it last printed the late ranks

    def line(self, rank: int, seconds: float, is_over: bool = False) -> str:
        """Returns "rank 0 has waited 20 s for rank 1 in a sum", as of rank 0; of a wait that `is_over` "rank 0 waited
        41 s for rank 1 (in data) in a sum"."""
        verb, phase = ("waited", self.phase) if is_over else ("has waited", "")
        late = numbered("rank", self.late) + (f" (in {phase})" if phase else "")
        return f"rank {rank} {verb} {seconds:.0f} s for {late} in {self.activity}"


# `Wait.line` in the log of a rank. The supervisor looks for the first one if the wait ended the process in C++.
WAITED = re.compile(r"^rank \d+ has waited \d+ s for ranks? [\d, ]+ in .+$", re.MULTILINE)
WAIT_OVER = re.compile(r"^rank \d+ waited (\d+) s for ranks? .+$", re.MULTILINE)


class Arrivals:
    """One rank's counts of exchanges, and the thread that compares them with the others' during a long wait. `store`
    opens a separate connection for the thread. Times are in seconds."""

    notice = 20.0  # a wait's length before the late ranks are named
    idle = 4.0  # time without an exchange before a rank writes its counts
    poll = 1.0

    def __init__(self, rank: int, store: Callable[[], Any], patience: float = 600.0):
        self.rank, self.patience, self._open = rank, patience, store
        self.counts: Counts = {}
        self._waits: list[Wait] = []
        self._changed, self._written = time.monotonic(), ""
        self._stop = threading.Event()

    def start(self, store: Any) -> None:
        """Writes this rank's first counts into `store` and starts the thread."""
        store.set(self._key(self.rank), self._status())
        thread = threading.Thread(target=self._run, args=[self._open()], daemon=True, name="late ranks")
        thread.start()
        atexit.register(self._end, thread)

    @contextmanager
    def waiting(
        self, group: str, members: Sequence[int], activity: str, computes: bool = False
    ) -> Iterator[None]:
        """Counts an exchange among `members` within the context. Raises LostPeerError, naming late ranks, at its limit.
        `computes`: this rank also computes within it."""
        self.counts[group] = self.counts.get(group, 0) + 1
        wait = Wait(group, members, activity, time.monotonic())
        self._changed = wait.since
        self._waits.append(wait)
        try:
            with heartbeat.waiting(activity, (f"{group} {members[0]}", self.counts[group], computes)):
                yield
        except (RuntimeError, ValueError, OSError, LostPeerError) as error:
            waited = time.monotonic() - wait.since
            if not wait.late or waited < 0.9 * self.patience:
                raise
            late = numbered("rank", wait.late)
            raise LostPeerError(
                f"{wait.line(self.rank, waited)}, which is the limit (train.patience). See the log of {late}, or set "
                "a larger train.patience."
            ) from error
        else:
            if wait.late:
                line = wait.line(self.rank, time.monotonic() - wait.since, is_over=True)
                print(f"{line} after step {heartbeat.step}", file=sys.stderr, flush=True)
        finally:
            self._waits.pop()
            self._changed = time.monotonic()

    def late(self, wait: Wait, counts: dict[int, Counts]) -> tuple[int, ...]:
        """Returns the members of an exchange with lower counts than this rank's."""
        own_count = self.counts.get(wait.group, 0)
        return tuple(r for r in wait.members if r != self.rank and counts[r].get(wait.group, 0) < own_count)

    def _run(self, store: Any) -> None:
        try:
            while not self._stop.wait(self.poll):
                now = time.monotonic()
                if now - self._changed < self.idle:
                    continue
                status = self._status()
                if status != self._written:
                    store.set(self._key(self.rank), status)
                    self._written = status
                wait = next(iter(self._waits[-1:]), None)
                if wait is not None and now - wait.since >= max(self.notice, 2 * wait.reported):
                    self._report(wait, store, now - wait.since)
        except Exception:  # noqa: BLE001 - the job's store is gone: the job ends, and its cause is reported elsewhere
            return

    def _report(self, wait: Wait, store: Any, waited: float) -> None:
        peers = [rank for rank in wait.members if rank != self.rank]
        statuses = {rank: json.loads(bytes(store.get(self._key(rank))).decode()) for rank in peers}
        wait.late = self.late(wait, {rank: each["counts"] for rank, each in statuses.items()})
        wait.reported = waited
        # A stopped rank's phase may be of an earlier step.
        late = [statuses[rank] for rank in wait.late]
        phases = {each["phase"] for each in late if each["step"] == heartbeat.step}
        wait.phase = phases.pop() if len(phases) == 1 and "unwatched" not in phases else ""
        if wait.late:
            print(wait.line(self.rank, waited), file=sys.stderr, flush=True)

    def _status(self) -> str:
        return json.dumps({"counts": dict(self.counts), "step": heartbeat.step, "phase": heartbeat.phase})

    def _end(self, thread: threading.Thread) -> None:
        self._stop.set()
        thread.join(timeout=1.0)

    @staticmethod
    def _key(rank: int) -> str:
        return f"paddle_dp/arrivals/{rank}"


def longest_wait(run: Path) -> str:
    """Returns the line of the longest wait for late ranks in the logs of a run's nodes, as far as they are on this
    disk; "" without such a wait. Shorter ones than `Arrivals.notice` have no line."""
    folders = [run, *run.parent.glob(f"{glob.escape(run.name)}.node-*")]
    logs = [log for folder in folders for log in folder.glob("logs/attempt-*/workerlog.*")]
    waits = [wait for log in logs for wait in WAIT_OVER.finditer(log.read_text(errors="replace"))]
    longest = max(waits, key=lambda wait: int(wait[1]), default=None)
    return "" if longest is None else longest[0]


_arrivals: list[Arrivals] = []


def waiting(
    group: str, members: Sequence[int], activity: str, computes: bool = False
) -> AbstractContextManager[None]:
    """Returns `Arrivals.waiting` for an exchange of this process; without other ranks an empty context."""
    return _arrivals[0].waiting(group, members, activity, computes) if _arrivals else nullcontext()


def start(rank: int, master: str, patience: float) -> None:
    """Starts counting in this process, after it has joined its job's store, which listens at `master` ("host:port")."""
    from paddle.base import core

    def connection() -> Any:
        host, _, port = master.rpartition(":")
        return JobStore(core.TCPStore(host, int(port), False, 0))

    _arrivals[:] = [Arrivals(rank, connection, patience)]
    _arrivals[0].start(job_store())
