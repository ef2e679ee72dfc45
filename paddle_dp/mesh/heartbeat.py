"""Where each rank is, written into a few words of shared memory that its supervisor reads: step, phase, sample, time.

Nothing is sent and nobody is asked: entering a phase costs one write of 104 bytes. The memory has no name in any file
system, so no disk can be full and nothing is left behind; ranks find it under /proc by their supervisor's number.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paddle_dp.mesh.environment import Environment
from paddle_dp.mesh.tape import Exchange, Tape

PHASES = (
    "start",  # from the process's first statement to the first batch
    "data",
    "forward",
    "backward",
    "exchange",
    "update",
    "evaluate",
    "checkpoint",
    "callbacks",
    "end",  # after the callbacks' end
    "done",  # and the process is about to leave
    "unwatched",  # it does not say where it is
)
VARIABLE = "PADDLE_DP_HEARTBEAT"
STARTED = "PADDLE_DP_STARTED"  # when the job's first attempt did: the origin of train.max_time
_NUMBER = {name: number for number, name in enumerate(PHASES)}
_RECORD = struct.Struct("<qdqqqqq48s")  # count, time, step, phase, sample, whether it waits, first step, what
_MOVED, _SAMPLE = struct.Struct("<qd"), struct.Struct("<q")
_AT_SAMPLE = struct.calcsize("<qdqq")
_NAME = struct.Struct("24s")
_AT_NAME = _RECORD.size
_SLOT = 128


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank as it was last seen. `count` grows with every sign of life; `time` is that of the last, in seconds of
    the machine's monotonic clock. `step`: updates done, `first` of them by earlier attempts. `sample`: the index of the
    sample that is read, or -1. `waits`: for other ranks. `stops`: when it is asked to, in good order. `name`: what it
    is beside a rank, «server 1»; "" for nothing else. `expendable`: the others go on without it."""

    count: int
    time: float
    step: int
    phase: str
    first: int = 0
    sample: int = -1
    waits: bool = False
    stops: bool = False
    activity: str = ""
    name: str = ""
    expendable: bool = False


class Heartbeat:
    """One rank's own record. Without a supervisor it is written all the same, into memory that nobody reads."""

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(_SLOT)
        self._at = 0
        self._count, self.step, self.first = 0, 0, 0
        self._phase, self._activity, self._waits = "start", b"", False
        self.stops = False
        self.expendable = False
        self.name = ""
        self._since = self.born = time.monotonic()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self.tape: Tape | None = None  # of the steps that are measured

    def attach(self, memory: bytearray | mmap.mmap, slot: int = 0) -> None:
        """From now on this record is the one at `slot` of `memory`."""
        self._memory, self._at = memory, slot * _SLOT
        self.call(self.name)

    def detach(self) -> None:
        """From now on nobody reads it: in a forked process, or at an entry point that does not say where it is."""
        self.attach(bytearray(_SLOT))
        self.tape = None

    def begin_tape(self, tape: Tape) -> None:
        """What this rank does from now on is on `tape`."""
        self._tally()
        self.tape = tape

    def end_tape(self) -> None:
        """What this rank did until now is on the tape, and nothing after it."""
        self._tally()
        self.tape = None

    def call(self, name: str) -> None:
        """What this rank is beside a rank, «server 1», for who speaks of it."""
        self.name = name
        _NAME.pack_into(self._memory, self._at + _AT_NAME, name.encode()[: _NAME.size])

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str, activity: str = "") -> None:
        """The rank does something else now; `activity` says it more exactly."""
        now = self._tally()
        self._phase, self._activity, self._waits = phase, activity.encode()[:48] if activity else b"", False
        self._write(now)

    def at(self, sample: int) -> None:
        """The rank reads this sample now."""
        self._count += 1
        _MOVED.pack_into(self._memory, self._at, self._count, time.monotonic())
        _SAMPLE.pack_into(self._memory, self._at + _AT_SAMPLE, sample)

    @contextmanager
    def within(self, phase: str, activity: str = "") -> Iterator[None]:
        """Around what is done in the midst of another phase."""
        before = self._phase, self._activity, self._waits
        self.enter(phase, activity)
        yield
        # Not after a failure: where it happened is worth more than where the rank would have gone on.
        now = self._tally()
        self._phase, self._activity, self._waits = before
        self._write(now)

    @contextmanager
    def waiting(self, activity: str, exchange: Exchange = ("", 0, False)) -> Iterator[None]:
        """Around an exchange: the rank is where it is because others have not come. Within another one that one's name
        stays, which says more. `exchange`: which one it is, for a tape."""
        before, now = (self._activity, self._waits), self._tally()
        self._activity, self._waits = self._activity if self._waits else activity.encode()[:48], True
        self._write(now)
        try:
            yield
        finally:
            began, now = now, self._tally()
            self._activity, self._waits = before
            if self.tape is not None and not self._waits:
                self.tape.wait(exchange, self._phase, began, now)
            self._write(now)

    def spent(self) -> dict[str, float]:
        """The seconds of this process so far, by phase, without those in which it waited for other ranks."""
        self._tally()
        return dict(self._spent)

    def _tally(self) -> float:
        """Adds the time since the last call to what was done in it, and returns now."""
        if self.tape is not None and self.tape.settle is not None:
            self.tape.settle()
        now = time.monotonic()
        if not self._waits:
            self._spent[self._phase] += now - self._since
            if self.tape is not None:
                self.tape.add(self._phase, self._activity.decode(errors="ignore"), now - self._since)
        self._since = now
        return now

    def _write(self, now: float) -> None:
        self._count += 1
        _RECORD.pack_into(
            self._memory, self._at, self._count, now, self.step, _NUMBER[self._phase], -1,
            self._waits + 2 * self.stops + 4 * self.expendable, self.first, self._activity,
        )  # fmt: skip


heartbeat = Heartbeat()
"""This process's own."""


def read(memory: bytes | bytearray | mmap.mmap, slot: int) -> RankStatus | None:
    """The record at `slot` of a board's memory; None before its first."""
    count, when, step, phase, sample, waits, first, activity = _RECORD.unpack_from(memory, slot * _SLOT)
    if not count:
        return None
    text = activity.rstrip(b"\0").decode(errors="ignore")
    (name,) = _NAME.unpack_from(memory, slot * _SLOT + _AT_NAME)
    return RankStatus(
        count=count, time=when, step=step, phase=PHASES[phase], first=first, sample=sample, waits=bool(waits & 1),
        stops=bool(waits & 2),
        expendable=bool(waits & 4), activity=text, name=name.rstrip(b"\0").decode(errors="ignore"),
    )  # fmt: skip


class StatusTable:
    """The records of a node's ranks, in memory of the process that watches them; `variables` lead the ranks to it.

    Raises OSError where there is no such memory (it is Linux's).
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file = os.memfd_create("paddle_dp-heartbeat")
        os.fchmod(self._file, 0o600)
        os.truncate(self._file, ranks * _SLOT)
        self._memory = mmap.mmap(self._file, ranks * _SLOT)
        os.close(os.open(self._path, os.O_RDWR))  # as the ranks will

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: self._path}

    def give(self, record: Heartbeat, slot: int = 0) -> None:
        """Gives the heartbeat of this very process its place here."""
        record.attach(self._memory, slot)

    def read(self, slot: int) -> RankStatus | None:
        """The record of the rank with this number on this node; None before its first."""
        return read(self._memory, slot)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


@contextmanager
def on_board() -> Iterator[None]:
    """Around the part of a script that says where it is: what lies before and after it is not watched."""
    if heartbeat.phase != "unwatched":
        yield
        return
    join_board()
    try:
        yield
    finally:
        heartbeat.enter("unwatched")
        heartbeat.detach()


def join_board() -> None:
    """Gives this process's record its place on the supervisor's board, where there is one."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    file = os.open(path, os.O_RDWR)
    try:
        heartbeat.attach(mmap.mmap(file, os.fstat(file).st_size), Environment.read().local_rank)
    finally:
        os.close(file)
    heartbeat.born = float(os.environ.get(STARTED, heartbeat.born))
    heartbeat.enter("start")
