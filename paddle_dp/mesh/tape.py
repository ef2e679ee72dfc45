"""Records one rank's work in some steps: its time by phase, each wait for others, and concurrent transfers.

A tape is attached to the heartbeat for measured steps, and filled at the heartbeat's events: there is no second clock,
and without a tape nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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

    def add(self, phase: str, activity: str, seconds: float) -> None:
        """Adds seconds to an activity of a phase."""
        self.active_seconds[phase, activity] = self.active_seconds.get((phase, activity), 0.0) + seconds
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
        return {
            "own": [[phase, activity, seconds] for (phase, activity), seconds in self.active_seconds.items()],
            "cpu": self.cpu,
            "waits": self.waits,
            "sends": self.sends,
            "transfers": self.transfers,
        }


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

    def add(self, phase: str, activity: str, seconds: float) -> None:
        super().add(phase, activity, seconds)
        now = time.monotonic()
        if len(self.spans) < MAX_ROWS:
            self.spans.append((phase, now - seconds, now))

    def computed(self) -> None:
        if self.drain is not None:
            self.drain()
            self.computed_at.append(time.monotonic())

    def hand_over(self, activity: str, start: float) -> None:
        if len(self.handovers) < MAX_ROWS:
            self.handovers.append((activity, start, time.monotonic()))
