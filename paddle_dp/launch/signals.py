"""Records signals to the supervisor while it waits: interrupt, terminate, hang up; and SIGUSR1, sent by schedulers."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Signals:
    """Records signals in `signals.number` within `with Signals() as signals:`, so that they do not end the process.

    `signals.times` counts them: a second Ctrl-C means «now». It has no effect outside the main thread.
    """

    def __init__(self) -> None:
        self.number = 0
        self.times = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in END_SIGNALS:
                # Under nohup SIGHUP stays ignored. SIGUSR1 is ignored only by `processes.tied_to`, so it is handled.
                if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.times += 1
