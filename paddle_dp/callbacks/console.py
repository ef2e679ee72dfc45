"""The screen: a live bar on a terminal, plain lines anywhere else, and at the end what was learned and where it is."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from paddle_dp.callbacks import _lines
from paddle_dp.callbacks._bar import Bar
from paddle_dp.callbacks._silent import Silent
from paddle_dp.train import Callback, Evaluation, Moment, Run
from paddle_dp.units import Every


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often a line is written, or the bar's numbers are brought up to date."""

    def build(self, run: Run) -> Callback:
        return Console(run, self.every) if run.mesh.is_main else Silent(self.every)


class Console(Callback):
    """Writes lines to stdout; where that is a terminal, or the launcher names one (PADDLE_DP_TTY), draws there."""

    def __init__(self, run: Run, every: Every):
        self.run, self.every = run, every
        self._bar: Bar | None = None
        self._lines = True
        self._began, self._first = 0.0, 0
        self._found: Evaluation | None = None
        self._saved: Path | None = None

    def start(self, moment: Moment) -> None:
        screen = terminal()
        # With a terminal of its own, stdout goes into a log file, which gets the lines as well.
        self._lines = screen is not sys.stdout
        self._began, self._first = time.perf_counter(), moment.progress.step
        self._found = self._saved = None
        if screen is not None:
            self._bar = Bar(screen, self.run.steps_per_epoch, moment.trainer.total_steps)
        self._say(_lines.start(self.run, moment.progress, moment.trainer.total_steps))
        if self._bar:
            self._bar.start(moment.progress)

    def step(self, moment: Moment) -> None:
        if self._bar:
            self._bar.show(moment.progress, moment.numbers)
        if self._lines:
            print(_lines.step(moment.progress, moment.numbers), flush=True)

    def evaluated(self, moment: Moment) -> None:
        self._found = moment.detail
        self._say(_lines.evaluated(moment.progress, moment.detail))

    def saved(self, moment: Moment) -> None:
        self._saved = moment.detail

    def end(self, moment: Moment) -> None:
        self._close()
        if moment.trainer.stopped:
            self._say(f"stopped at step {moment.progress.step}: {moment.trainer.stopped}")
        seconds, steps = time.perf_counter() - self._began, moment.progress.step - self._first
        differences = moment.trainer.differences
        for line in _lines.summary(self.run, steps, seconds, self._found, self._saved, differences):
            self._say(line)

    def failed(self, moment: Moment) -> None:
        self._close()

    def _say(self, text: str) -> None:
        if self._bar:
            self._bar.say(text)
        if self._lines:
            print(text, flush=True)

    def _close(self) -> None:
        if self._bar:
            self._bar.close()


def terminal() -> TextIO | None:
    """The terminal to draw on: the one the launcher names, else stdout if it is one."""
    named = os.environ.get("PADDLE_DP_TTY")
    if named:
        try:
            screen = open(named, "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the training
            return screen if screen.isatty() else None
        except OSError:
            return None
    return sys.stdout if sys.stdout.isatty() else None
