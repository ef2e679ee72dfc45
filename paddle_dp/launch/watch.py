"""Watches the ranks of one launcher from outside: which process is which rank, and how each ended."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.launch.processes import exit_of, variable


@dataclass(frozen=True, kw_only=True)
class Departure:
    """The end of a rank's process. `code`: its exit code, negative for a signal, None if it was not seen in time."""

    rank: int
    pid: int
    time: float
    code: int | None


class Watch:
    """Looks at the launcher's children; cheap enough for ten times a second.

    The launcher reports only one failed rank, the lowest, and up to two seconds late. A child that has ended stays
    visible as a zombie, with its exit code, until the launcher waits for it: so `rest` returns as soon as a rank ends,
    or the exit code of one kill in twenty would be lost.
    """

    def __init__(self, launcher: int):
        self.launcher = launcher
        self.pids: dict[int, int] = {}
        self.departures: dict[int, Departure] = {}
        self._ends = select.poll()  # readable when a rank has ended
        self._handles: dict[int, int] = {}  # a pidfd of each living rank

    def look(self) -> None:
        """Records the ranks that have started and ended since the last call."""
        known = set(self.pids.values())
        for pid in self._children():
            if pid not in known and (word := variable(pid, "PADDLE_TRAINER_ID")) is not None:
                self.pids[int(word)] = pid
                self._open_handle(int(word), pid)
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
        except (AttributeError, OSError):  # it ended already, or a kernel before 5.3: `rest` then only sleeps
            return
        self._ends.register(self._handles[rank], select.POLLIN)

    def _close_handle(self, rank: int) -> None:
        if (handle := self._handles.pop(rank, None)) is not None:
            self._ends.unregister(handle)
            os.close(handle)

    def _children(self) -> list[int]:
        try:
            return list(
                map(int, Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text().split())
            )
        except OSError:
            return []

    @property
    def living(self) -> list[int]:
        """The pids of the ranks that have not ended."""
        return [pid for rank, pid in self.pids.items() if rank not in self.departures]

    @property
    def failed(self) -> list[Departure]:
        """Ranks that are known to have ended with anything but 0."""
        return [departure for departure in self.departures.values() if departure.code]

    def all_well(self, ranks: int) -> bool:
        """Whether all `ranks` have started, and ended with 0."""
        return len(self.departures) == ranks and all(d.code == 0 for d in self.departures.values())
