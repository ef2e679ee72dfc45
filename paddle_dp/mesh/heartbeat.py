"""Each rank writes its step, phase, sample and time into shared memory that its supervisor reads.

Entering a phase costs one write of 104 bytes. The memory has no name in any file system, so no disk can be full and
nothing is left over; ranks find it under /proc by their supervisor's pid.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paddle_dp.mesh.environment import Environment, memory_file

# "start" ends with the first batch, and "end" begins after the callbacks' end. A rank that is "done" is about to leave;
# one that is "unwatched" does not report its phases.
PHASES = (
    "start", "data", "forward", "backward", "exchange", "update", "evaluate", "checkpoint", "callbacks", "end", "done",
    "unwatched",
)  # fmt: skip
VARIABLE = "PADDLE_DP_HEARTBEAT"
STARTED = "PADDLE_DP_STARTED"  # when the job's first attempt started: the origin of train.max_time
_NUMBER = {name: number for number, name in enumerate(PHASES)}
_RECORD = struct.Struct("<qdqqqqq48s")  # count, time, sample, step, phase, flags, first step, activity
_READING = struct.Struct("<qdq")  # count, time, sample: the beginning of a record
_NAME = struct.Struct("24s")
_AT_NAME = _RECORD.size
_SLOT = 128


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank's last status. `count` grows with every sign of life; `time` is the last one's, in seconds of the
    machine's monotonic clock. `step`: updates done, `first` of them by earlier attempts. `sample`: the index of the
    sample that it reads, or -1. `waits`: it waits for other ranks. `can_stop`: it can stop in good order; `will_stop`:
    all ranks have agreed to. `name`: its role, "server 1", or "". `expendable`: the others can continue without it."""

    count: int
    time: float
    step: int
    phase: str
    first: int = 0
    sample: int = -1
    waits: bool = False
    can_stop: bool = False
    will_stop: bool = False
    activity: str = ""
    name: str = ""
    expendable: bool = False


class Heartbeat:
    """One rank's record. Without a supervisor it is written into private memory."""

    def __init__(self) -> None:
        self._memory: bytearray | mmap.mmap = bytearray(_SLOT)
        self._at, self._record = 0, slice(0, _RECORD.size)
        self._count, self.step, self.first = 0, 0, 0
        self._phase, self._activity, self._waits = "start", "", False
        self.can_stop = self.will_stop = False
        self.expendable = False
        self.name = ""
        self._since = self.born = time.monotonic()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self.tape: Tape | None = None  # set during measured steps

    def attach(self, memory: bytearray | mmap.mmap, slot: int = 0) -> None:
        """Moves this record to `slot` of `memory`."""
        self._memory, self._at = memory, slot * _SLOT
        self._record = slice(self._at, self._at + _RECORD.size)
        self.call(self.name)

    def detach(self) -> None:
        """Moves the record to private memory: in a forked process, or at an entry point that reports no phases."""
        self.attach(bytearray(_SLOT))
        self.tape = None

    def begin_tape(self, tape: Tape) -> None:
        """Records this rank's work on `tape` from now on."""
        self._tally()
        self.tape = tape

    def end_tape(self) -> None:
        """Ends the tape; it has this rank's work until now."""
        self._tally()
        self.tape = None

    def call(self, name: str) -> None:
        """Sets the role shown in messages, "server 1"."""
        self.name = name
        at = self._at + _AT_NAME
        self._memory[at : at + _NAME.size] = _NAME.pack(name.encode())

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str, activity: str = "", waits: bool = False) -> float:
        """Enters a phase: adds the time since the last entry to the phase before, writes the record and returns now.

        `activity` describes the phase in detail; `waits`: for other ranks, which counts as no phase's time.
        """
        if self.tape is not None and self.tape.settle is not None:
            self.tape.settle()
        now = time.monotonic()
        if not self._waits:
            self._spent[self._phase] += now - self._since
            if self.tape is not None:
                self.tape.add(self._phase, self._activity, self._since, now)
        self._since, self._count = now, self._count + 1
        self._phase, self._activity, self._waits = phase, activity, waits
        flags = waits + 2 * self.can_stop + 4 * self.expendable + 8 * self.will_stop
        number, text = _NUMBER[phase], activity.encode()
        # `pack_into` would fill the record with zeros first, and a reader, or a signal that stops this process then,
        # would find a rank that has not begun.
        self._memory[self._record] = _RECORD.pack(
            self._count, now, -1, self.step, number, flags, self.first, text
        )
        return now

    def at(self, sample: int) -> None:
        """Reports that the rank now reads this sample."""
        self._count += 1
        content = _READING.pack(self._count, time.monotonic(), sample)
        self._memory[self._at : self._at + _READING.size] = content

    @contextmanager
    def within(self, phase: str, activity: str = "") -> Iterator[None]:
        """Enters a phase within another one; returns to that one unless an error is raised."""
        before = self._phase, self._activity, self._waits
        self.enter(phase, activity)
        yield
        self.enter(*before)  # not after a failure: its phase is worth more than the phase before it

    @contextmanager
    def waiting(self, activity: str, exchange: Exchange = ("", 0, False)) -> Iterator[None]:
        """Marks the rank as waiting for others within an exchange; a nested exchange keeps the outer, clearer name.
        `exchange` identifies it on a tape."""
        before = self._activity, self._waits
        began = self.enter(self._phase, self._activity if self._waits else activity, waits=True)
        try:
            yield
        finally:
            now = self.enter(self._phase, *before)
            if self.tape is not None and not self._waits:
                self.tape.wait(exchange, self._phase, began, now)

    def spent(self) -> dict[str, float]:
        """Returns the seconds of this process so far, by phase, without waits for other ranks."""
        self._tally()
        return dict(self._spent)

    def _tally(self) -> None:
        """Counts the time until now, within the current phase."""
        self.enter(self._phase, self._activity, self._waits)


heartbeat = Heartbeat()
"""This process's heartbeat."""


def read(memory: bytes | bytearray | mmap.mmap, slot: int) -> RankStatus | None:
    """Returns the status at `slot` of a board's memory; None before the first."""
    count, when, sample, step, phase, flags, first, activity = _RECORD.unpack_from(memory, slot * _SLOT)
    if not count:
        return None
    text = activity.rstrip(b"\0").decode(errors="ignore")
    (name,) = _NAME.unpack_from(memory, slot * _SLOT + _AT_NAME)
    return RankStatus(
        count=count, time=when, step=step, phase=PHASES[phase], first=first, sample=sample, waits=bool(flags & 1),
        can_stop=bool(flags & 2), expendable=bool(flags & 4), will_stop=bool(flags & 8), activity=text,
        name=name.rstrip(b"\0").decode(errors="ignore"),
    )  # fmt: skip


class StatusTable:
    """The records of a node's ranks, in memory of the process that watches them; `variables` name it to the ranks.

    Raises OSError on a system without such memory (only Linux has it).
    """

    def __init__(self, ranks: int):
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._file, path = memory_file("heartbeat", bytes(ranks * _SLOT))
        self._memory = mmap.mmap(self._file, ranks * _SLOT)
        os.close(os.open(path, os.O_RDWR))  # tests that the ranks will be able to
        self.variables = {VARIABLE: path}

    def give(self, record: Heartbeat, slot: int = 0) -> None:
        """Attaches a heartbeat of this process to `slot`."""
        record.attach(self._memory, slot)

    def read(self, slot: int) -> RankStatus | None:
        """Returns the status of this node's rank at `slot`; None before its first."""
        return read(self._memory, slot)

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


@contextmanager
def on_board() -> Iterator[None]:
    """Reports phases within the context, a part of a script that is otherwise unwatched."""
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
    """Attaches this process's record to the supervisor's board, if there is one."""
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


# The tape of measured steps -------------------------------------------------------------------------------------------
# A tape has one rank's work in some steps: its time by phase, each wait for others, and concurrent transfers. It is
# attached to the heartbeat for measured steps, and filled at the heartbeat's events: there is no second clock, and
# without a tape nothing is measured.

MAX_ROWS = 20_000  # waits, sends or transfers that a tape holds; later ones are not recorded
LARGE = 4096  # bytes of the smallest transfer that counts: smaller ones arrive before a rank can wait

Exchange = tuple[str, int, bool]
"""The exchange in which a rank waits: its group, its index in the group, and True if the rank also computes in it."""


class Tape:
    """One rank's record. Times are seconds of the machine's monotonic clock.

    `active_seconds`: seconds without waiting, by (phase, activity). `cpu`: the part of them with this thread on a core,
    by phase. `waits`: [group, number, phase, start, stop, computes] of each wait that is not within another. `sends`:
    [group, to, number, time] of messages; `transfers`: [start, stop] in which a thread of the transport read or wrote
    a message. `settle` is called before each reading of the clock: on an accelerator it waits for the device.
    """

    def __init__(self, settle: Callable[[], None] | None = None):
        self.settle = settle
        self.active_seconds: dict[tuple[str, str], float] = {}
        self.cpu: dict[str, float] = {}
        self.waits: list[tuple[str, int, str, float, float, bool]] = []
        self.sends: list[tuple[int, int, int, float]] = []
        self.transfers: list[tuple[float, float]] = []
        self._thread = time.thread_time()

    def add(self, phase: str, activity: str, start: float, stop: float) -> None:
        """Adds this time to an activity of a phase."""
        before = self.active_seconds.get((phase, activity), 0.0)
        self.active_seconds[phase, activity] = before + (stop - start)
        now = time.thread_time()
        self.cpu[phase] = self.cpu.get(phase, 0.0) + now - self._thread
        self._thread = now

    def wait(self, exchange: Exchange, phase: str, start: float, stop: float) -> None:
        """Records a wait of this rank in an exchange."""
        self._thread = time.thread_time()
        if len(self.waits) < MAX_ROWS:
            group, number, computes = exchange
            self.waits.append((group, number, phase, start, stop, computes))

    def send(self, group: int, to: int, number: int) -> None:
        """Records that this rank has sent the `number`-th message of a group to rank `to`."""
        if len(self.sends) < MAX_ROWS:
            self.sends.append((group, to, number, time.monotonic()))

    def transfer(self, start: float, size: int) -> None:
        """Records that a thread has transferred a message of `size` bytes, from `start` until now."""
        if size >= LARGE and len(self.transfers) < MAX_ROWS:
            self.transfers.append((start, time.monotonic()))

    def hand_over(self, activity: str, start: float) -> None:
        """Called after a gradient or a bucket was handed over for its exchange, from `start` on. Does nothing."""

    def computed(self) -> None:
        """Called when this rank has computed all of a backward, and only exchanges remain in it. Does nothing."""

    def as_json(self) -> dict[str, Any]:
        """Returns lists and numbers, with which ranks compare their tapes."""
        active = [[phase, activity, seconds] for (phase, activity), seconds in self.active_seconds.items()]
        lists = {"waits": self.waits, "sends": self.sends, "transfers": self.transfers}
        return {"own": active, "cpu": self.cpu, **lists}


class ExchangeTrace(Tape):
    """A tape that also keeps the times of all work, for a timeline. `spans`: [phase, start, stop] of work without
    waits. `handovers`: [activity, start, stop] of gradients and buckets handed over. `computed_at`: times at which an
    accelerator had computed a whole backward; `drain` waits for that, but not for transfers."""

    def __init__(self, settle: Callable[[], None] | None = None, drain: Callable[[], None] | None = None):
        super().__init__(settle)
        self.drain = drain
        self.computed_at: list[float] = []
        self.spans: list[tuple[str, float, float]] = []
        self.handovers: list[tuple[str, float, float]] = []

    def add(self, phase: str, activity: str, start: float, stop: float) -> None:
        super().add(phase, activity, start, stop)
        if len(self.spans) < MAX_ROWS:
            self.spans.append((phase, start, stop))

    def computed(self) -> None:
        if self.drain is not None:
            self.drain()
            self.computed_at.append(time.monotonic())

    def hand_over(self, activity: str, start: float) -> None:
        if len(self.handovers) < MAX_ROWS:
            self.handovers.append((activity, start, time.monotonic()))
