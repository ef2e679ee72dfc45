"""What one rank did in some steps: its own time by phase, each wait for others, and what was carried beside its work.

A tape hangs on the heartbeat for the steps that are measured, and is filled at the moments that the heartbeat sees
anyway: there is no second clock, and without a tape nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MAX_ROWS = 20_000  # waits, sends or transfers that a tape holds: what comes after is not told apart by rank
LARGE = 4096  # bytes of the smallest message whose transfer counts: less is there before anybody could wait for it

Exchange = tuple[str, int, bool]
"""Which exchange a rank waits in: its group, the how manieth of the group, whether the rank computes in it, too."""


class Tape:
    """One rank's record. Times are seconds of the machine's monotonic clock.

    `active_seconds`: seconds without waiting, by (phase, what). `cpu`: of these, in which this thread was on a core, by
    phase.
    `waits`: [group, number, phase, start, stop, computes] of each wait that is not within another. `sends`:
    [group, to, number, time] of messages; `transfers`: [start, stop] in which a thread of the carrier read or wrote
    one. `settle` is called before each reading of the clock: on an accelerator it waits for the device.
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
        """This rank did this for so long."""
        self.active_seconds[phase, activity] = self.active_seconds.get((phase, activity), 0.0) + seconds
        now = time.thread_time()
        self.cpu[phase] = self.cpu.get(phase, 0.0) + now - self._thread
        self._thread = now

    def wait(self, exchange: Exchange, phase: str, start: float, stop: float) -> None:
        """This rank waited in an exchange."""
        self._thread = time.thread_time()
        if len(self.waits) < MAX_ROWS:
            group, number, computes = exchange
            self.waits.append((group, number, phase, start, stop, computes))

    def send(self, group: int, to: int, number: int) -> None:
        """This rank has sent the `number`-th message of a group to a rank."""
        if len(self.sends) < MAX_ROWS:
            self.sends.append((group, to, number, time.monotonic()))

    def transfer(self, start: float, size: int) -> None:
        """A thread has just carried a message of `size` bytes, and began at `start`."""
        if size >= LARGE and len(self.transfers) < MAX_ROWS:
            self.transfers.append((start, time.monotonic()))

    def hand_over(self, activity: str, start: float) -> None:
        """This rank has just given a gradient, or a bucket of them, to be exchanged, and began that at `start`."""

    def computed(self) -> None:
        """This rank has computed all of a backward: until its end it waits for what others have to do in it."""

    def as_json(self) -> dict[str, Any]:
        """For the ranks that compare theirs: lists and numbers."""
        return {
            "own": [[phase, activity, seconds] for (phase, activity), seconds in self.active_seconds.items()],
            "cpu": self.cpu,
            "waits": self.waits,
            "sends": self.sends,
            "transfers": self.transfers,
        }


class ExchangeTrace(Tape):
    """A tape that also keeps when each piece of work was, for a picture: `spans`, [phase, start, stop], without waits;
    `handovers`, [what, start, stop] of gradients and buckets that were handed over; `computed_at`: when all of a
    backward
    was computed on an accelerator, for which `drain` waits, and not for what travels."""

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
