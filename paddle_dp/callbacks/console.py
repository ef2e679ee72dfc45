"""Prints to the screen: a progress bar on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paddle_dp.callbacks import _lines
from paddle_dp.train import Callback, Evaluation, Moment, Progress, Refusal, Run
from paddle_dp.units import Every

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from paddle_dp.data import Sampler
    from paddle_dp.train.callback import StepMeasurement


# The progress bar on a terminal: the epoch's progress, the last numbers, the time left --------------------------------


# Seconds between two drawings. A drawing costs about a millisecond, so five per second cost half a percent of the time.
_PAUSE = 0.2
_SMALLEST = 8  # columns of the bar itself
_LEFT = "1:02:03 left"


class Lines:
    """Plain lines on stdout, as a target of the console."""

    def start(self, progress: Progress) -> None:
        """Does nothing: stdout is open."""

    def show(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        self.print_line(_lines.step(progress, metrics))

    def print_line(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        """Does nothing: stdout stays open."""


class Bar(Lines):
    """A bar on `screen`, a terminal; its rest is hidden, and lines printed with `print_line` stay above it."""

    def __init__(
        self, screen: TextIO, steps_per_epoch: int, total_steps: int, sampler: Sampler | None = None
    ):
        """`sampler`: where epochs have unequal numbers of steps."""
        self.screen, self.steps_per_epoch, self.total_steps = screen, max(steps_per_epoch, 1), total_steps
        self.epochs = -(-self.total_steps // self.steps_per_epoch)
        if sampler is not None:
            self.epochs = math.ceil(sampler.epochs(total_steps))
        self._sampler = sampler
        self._rich = self._make()
        self._task = self._rich.add_task("", total=self.steps_per_epoch, text="", left="")
        self._began: tuple[float, int] | None = None
        self._drawn = 0.0
        self._last = ""  # the line of the last step shown, which stays when the bar is removed

    def start(self, progress: Progress) -> None:
        self._began = (time.perf_counter(), progress.step)
        self._rich.start()

    def show(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Draws the numbers, with the next line if the bar was drawn just before; the last step's stay as a line."""
        now, self._last = time.perf_counter(), _lines.step(progress, metrics)
        self._fit()
        self._rich.update(
            self._task,
            completed=progress.batch,
            total=self._sampler.batches_of(progress.epoch) if self._sampler else self.steps_per_epoch,
            description=self._epoch(progress.epoch + 1),
            text=_lines.short(metrics, self._room()),
            left=f"{_lines.duration(self._left(now, progress.step))} left",
        )
        if now - self._drawn < _PAUSE and progress.step < self.total_steps:
            return
        self._rich.refresh()
        self._drawn = time.perf_counter()
        if progress.step >= self.total_steps:
            self._print_last()

    def print_line(self, text: str) -> None:
        self._rich.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._rich.refresh()

    def close(self) -> None:
        """Removes the bar; printed lines and the numbers of the last step stay."""
        self._print_last()
        self._rich.stop()

    def _print_last(self) -> None:
        if self._last:
            self.print_line(self._last)
        self._last = ""

    def _left(self, now: float, step: int) -> float:
        began, first = self._began or (now, step)
        return (now - began) / max(step - first, 1) * (self.total_steps - step)

    def _make(self) -> RichProgress:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        def text(field: str, **settings: Any) -> TextColumn:
            column = Column(no_wrap=True, overflow="ellipsis", **settings)
            return TextColumn(field, markup=False, table_column=column)

        is_stdout = self.screen is sys.stdout  # the process's other output then appears above the bar, too
        return RichProgress(
            text("{task.description}", min_width=len(self._epoch(self.epochs))),
            BarColumn(bar_width=None, style="conceal", table_column=Column(ratio=1, min_width=_SMALLEST)),
            text("{task.fields[text]}"),
            text("{task.fields[left]}", justify="right", min_width=len(_LEFT)),
            console=Console(file=self.screen, force_terminal=True), auto_refresh=False, expand=True, transient=True,
            redirect_stdout=is_stdout, redirect_stderr=is_stdout,
        )  # fmt: skip

    def _epoch(self, number: int) -> str:
        return f"epoch {number}/{self.epochs}"

    def _room(self) -> int:
        """The columns for the numbers, next to the epoch, the smallest bar, and the time left."""
        return self._rich.console.width - len(self._epoch(self.epochs)) - _SMALLEST - len(_LEFT) - 3

    def _fit(self) -> None:
        """Sets the width: rich queries stdin, stdout and stderr, and the terminal may be none of them."""
        try:
            width, height = os.get_terminal_size(self.screen.fileno())
        except (OSError, ValueError):
            return
        if width and height:
            self._rich.console.size = (width, height)


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often to write a line or update the bar's numbers."""

    def build(self, run: Run) -> Callback:
        return Console(run, self.every)


class Console(Callback):
    """Writes lines to stdout, or draws a bar if that is a terminal; the launcher may name a terminal for the bar
    (PADDLE_DP_TTY).

    Only the main rank writes; the others have no sinks.
    """

    weights = False

    def __init__(self, run: Run, every: Every):
        self.run, self.every = run, every
        self._sinks: list[Lines] = []
        self._began, self._first, self._read = 0.0, 0, 0
        self._evaluation: Evaluation | None = None
        self._saved: Path | None = None
        # (number of steps, bytes sent per step): some strategies send in few steps only.
        self._sent: list[tuple[int, float]] = []
        self._left_out: set[int] = set()  # steps of updates that the guard left out
        self._failed_trials: list[str] = []  # lines that follow the first updates

    def start(self, moment: Moment) -> None:
        self._began, self._first = time.perf_counter(), moment.progress.step
        self._evaluation = self._saved = None
        self._sent, self._read = [], moment.progress.step
        self._left_out.clear()
        self._sinks = self._opened(moment) if self.run.mesh.is_main else []
        self._print_line(_lines.start(self.run, moment.progress, moment.trainer.total_steps))
        for line in _lines.known(self.run, moment.trainer, moment.progress.step) if self._sinks else ():
            self._print_line(line)
        self._failed_trials = [*_lines.failed_trials(self.run, moment.trainer)] if self._sinks else []
        self._on_each(lambda sink: sink.start(moment.progress))

    def step(self, moment: Moment) -> None:
        if "sent" in moment.numbers:
            self._sent.append((moment.progress.step - self._read, moment.numbers["sent"]))
        self._read = moment.progress.step
        while self._failed_trials:
            self._print_line(self._failed_trials.pop(0))
        self._on_each(lambda sink: sink.show(moment.progress, moment.numbers))

    def measured(self, moment: Moment, measured: StepMeasurement) -> None:
        if measured.is_shown:
            for line in measured.report():
                self._print_line(line)
        elif starvation := measured.starvation():
            self._print_line(starvation)

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._print_line(_lines.evaluated(moment.progress, evaluation))

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if refusal.action == "skip":
            self._left_out.add(refusal.step)
        else:  # these steps are repeated, the refused batch included
            self._read = moment.progress.step
            self._left_out = {step for step in self._left_out if step <= moment.progress.step}

    def saved(self, moment: Moment, path: Path) -> None:
        self._saved = path

    def end(self, moment: Moment) -> None:
        self._close()
        if moment.trainer.early_end:
            self._print_line(f"stopped at step {moment.progress.step}: {moment.trainer.early_end}")
        seconds, steps = time.perf_counter() - self._began, moment.progress.step - self._first
        if self._left_out:
            self._print_line(_lines.left_out(len(self._left_out), steps))
        sender = self.run.mesh.axes.role(self.run.mesh.rank) or "each rank"
        took = _lines.Took(steps, seconds, _lines.mean(self._sent), sender, self._first)
        for line in _lines.summary(self.run, took, self._evaluation, self._saved, moment.trainer):
            self._print_line(line)

    def failed(self, moment: Moment, error: BaseException) -> None:
        self._close()

    def _opened(self, moment: Moment) -> list[Lines]:
        screen = terminal()
        if screen is None:
            return [Lines()]
        sampler = self.run.train_loader.sampler
        ramped = sampler if sampler.ramp else None
        bar = Bar(screen, self.run.steps_per_epoch, moment.trainer.total_steps, ramped)
        # With a terminal from the launcher, stdout is a log file, which gets the lines, too.
        return [bar] if screen is sys.stdout else [bar, Lines()]

    def _print_line(self, text: str) -> None:
        self._on_each(lambda sink: sink.print_line(text))

    def _close(self) -> None:
        self._on_each(lambda sink: sink.close())

    def _on_each(self, call: Callable[[Lines], None]) -> None:
        """Calls each sink. A screen that cannot be written does not end the training: a line is lost, a bar removed."""
        for sink in list(self._sinks):
            try:
                call(sink)
            except OSError:
                if isinstance(sink, Bar):
                    self._sinks.remove(sink)


def terminal() -> TextIO | None:
    """The terminal to draw on: the one that PADDLE_DP_TTY names, else stdout if it is one; None otherwise."""
    named = os.environ.get("PADDLE_DP_TTY")
    if named:
        try:
            # These flags neither create nor truncate a file.
            file = os.open(named, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:
            return None
        if not os.isatty(file):
            os.close(file)
            return None
        os.set_blocking(file, True)
        return open(file, "w", encoding="utf-8")  # stays open as long as the training
    return sys.stdout if sys.stdout and sys.stdout.isatty() else None  # None: closed when Python began
