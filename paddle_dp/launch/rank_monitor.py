"""Monitors a job's ranks from outside: finds each rank's process, and how it ended."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Protocol

from paddle_dp.launch.processes import alive, descendants, exit_of, marked, text_of, variable

if TYPE_CHECKING:
    from paddle_dp.launch.command import LaunchPlan

LAUNCHER_MARK = "PADDLE_DP_LAUNCHER"  # variable of a launcher that was started before its attempt had a mark


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The end of a rank's process. `code`: its exit code, negative for a signal, None if it was seen too late."""

    rank: int
    pid: int
    time: float
    code: int | None

    @property
    def failed(self) -> bool:
        """True if the rank is known to have ended with another code than 0."""
        return bool(self.code)


class Started(Protocol):
    """A job's ranks and their starter: Paddle's launcher (Launcher), waiting processes (prepared_ranks.Forks), or the
    supervisor's process (rank_launcher.RankLauncher)."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None:
        """Returns the exit status of the ranks' starter; None while it lives."""

    def wait(self) -> object:
        """Waits for the starter's end. Call it when no rank is left."""

    def ranks(self) -> Mapping[int, int]:
        """Returns the pid of each rank that has started and has not been waited for."""

    def left(self) -> list[int]:
        """Returns the living processes of this job, to be killed in the end."""


class PreparedRanks(Protocol):
    """Waiting ranks, or a launcher, prepared before the job is known."""

    def begin(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> Started | None:
        """Starts the plan's ranks, which write to `attempt`; returns None if it cannot start them."""


class Launcher(Popen[bytes]):
    """Paddle's launcher, whose children are the ranks. `expected`: the ranks that it starts, in this order.

    `first_log`: the file that it creates right before the first rank. Earlier children are no ranks: with several
    nodes, one serves the rendezvous. `mark`: the value of LAUNCHER_MARK in the environment of the launcher and of its
    forks, if it was started before its attempt: /proc shows no variable that a process got after its start.
    """

    expected: Sequence[int] = ()
    first_log: Path | None = None
    mark: str = ""
    _known_children: Sequence[int] = ()

    def ranks(self) -> Mapping[int, int]:
        """Returns the pid of each rank that has started and that the launcher has not waited for yet.

        The environment identifies a rank. A rank that ended before that gets its number from the launcher's order, as
        soon as no other rank is missing.
        """
        children = self._children()
        if self.first_log is not None and not self.first_log.exists():
            self._known_children = children
        children = [pid for pid in children if pid not in self._known_children]
        known = {pid: int(rank) for pid in children if (rank := variable(pid, "PADDLE_TRAINER_ID"))}
        in_order = [pid for pid in children if pid in known or exit_of(pid)[0]]
        if len(in_order) == len(self.expected):
            return dict(zip(self.expected, in_order, strict=True))
        return {rank: pid for pid, rank in known.items()}

    def left(self) -> list[int]:
        """Returns the living processes among the launcher, its descendants and its forks that have lost it."""
        forks = marked(LAUNCHER_MARK, self.mark) if self.mark else []
        return [*(descendants(self.pid) if self.poll() is None else []), *filter(alive, [self.pid]), *forks]

    def _children(self) -> list[int]:
        return list(map(int, text_of(Path(f"/proc/{self.pid}/task/{self.pid}/children")).split()))


class RankMonitor:
    """Monitors the ranks whose pids `ranks` returns; cheap enough for ten looks a second.

    The launcher reports only one failed rank, the lowest, and up to two seconds late. An ended child keeps its exit
    code as a zombie until the launcher waits for it: so `rest` returns as soon as a rank ends, or the exit code of one
    kill in twenty would be lost.
    """

    def __init__(self, ranks: Callable[[], Mapping[int, int]]):
        self._ranks = ranks
        self.pids: dict[int, int] = {}
        self.departures: dict[int, Departure] = {}
        self._ends = select.poll()  # readable when a rank has ended
        self._handles: dict[int, int] = {}  # pidfds by living rank

    def look(self) -> None:
        """Records the ranks that have started and ended since the last call."""
        for rank, pid in self._ranks().items():
            if self.pids.get(rank) != pid:
                self.pids[rank] = pid
                self._open_handle(rank, pid)
        for rank, pid in self.pids.items():
            if rank not in self.departures:
                gone, code = exit_of(pid)
                if gone:
                    self.departures[rank] = Departure(rank=rank, pid=pid, time=time.time(), code=code)
                    self._close_handle(rank)

    def rest(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until a rank ends."""
        self._ends.poll(1000 * seconds)

    def close(self) -> None:
        """Closes the handles of all processes."""
        for rank in list(self._handles):
            self._close_handle(rank)

    def _open_handle(self, rank: int, pid: int) -> None:
        try:
            self._handles[rank] = os.pidfd_open(pid)
        except OSError:  # it ended already, or a kernel before 5.3: `rest` only sleeps
            return
        self._ends.register(self._handles[rank], select.POLLIN)

    def _close_handle(self, rank: int) -> None:
        if (handle := self._handles.pop(rank, None)) is not None:
            self._ends.unregister(handle)
            os.close(handle)

    @property
    def living(self) -> list[int]:
        """The pids of the ranks that have not ended."""
        return [pid for rank, pid in self.pids.items() if rank not in self.departures]

    @property
    def failed(self) -> list[Departure]:
        """The ends of ranks that failed."""
        return [departure for departure in self.departures.values() if departure.failed]

    def all_well(self, ranks: int, lost: Container[int] = ()) -> bool:
        """True if all `ranks` have started and ended, each with 0 unless it is `lost`."""
        ended = self.departures.values()
        return len(ended) == ranks and all(d.code == 0 or d.rank in lost for d in ended)
