"""The progress bar on a terminal: the epoch's progress, the last numbers, the time left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from paddle_dp.callbacks import _lines
from paddle_dp.train import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

# Seconds between two drawings. A drawing costs about a millisecond, so five per second cost half a percent of the time.
_PAUSE = 0.2
_SMALLEST = 8  # columns of the bar itself
_LEFT = "1:02:03 left"


class Bar:
    """A bar on `screen`, a terminal; lines printed with `print_line` stay above it."""

    def __init__(self, screen: TextIO, steps_per_epoch: int, total_steps: int):
        self.screen, self.steps_per_epoch, self.total_steps = screen, max(steps_per_epoch, 1), total_steps
        self.epochs = -(-self.total_steps // self.steps_per_epoch)
        self._rich = self._make()
        self._task = self._rich.add_task("", total=self.steps_per_epoch, text="", left="")
        self._began: tuple[float, int] | None = None
        self._drawn = 0.0
        self._last = ""  # the line of the last step shown, which stays when the bar is removed

    def start(self, progress: Progress) -> None:
        self._began = (time.perf_counter(), progress.step)
        self._rich.start()

    def show(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        """Draws the numbers, unless the bar was drawn just before; the last step's also stay as a line."""
        now, self._last = time.perf_counter(), _lines.step(progress, metrics)
        if now - self._drawn < _PAUSE and progress.step < self.total_steps:
            return
        self._fit()
        self._rich.update(
            self._task,
            completed=progress.batch,
            description=self._epoch(progress.epoch + 1),
            text=_lines.short(metrics, self._room()),
            left=f"{_lines.duration(self._left(now, progress.step))} left",
        )
        self._rich.refresh()
        self._drawn = time.perf_counter()
        if progress.step >= self.total_steps:
            self._print_last()

    def print_line(self, text: str) -> None:
        """Prints a line above the bar."""
        self._rich.console.print(text, highlight=False, markup=False, soft_wrap=True)

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
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=_SMALLEST)),
            text("{task.fields[text]}"),
            text("{task.fields[left]}", justify="right", min_width=len(_LEFT)),
            console=Console(file=self.screen, force_terminal=True),
            auto_refresh=False,
            expand=True,
            transient=True,
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout,
        )

    def _epoch(self, number: int) -> str:
        return f"epoch {number}/{self.epochs}"

    def _room(self) -> int:
        """The columns for the numbers, next to the epoch, the smallest bar, and the time left."""
        widths = (len(self._epoch(self.epochs)), _SMALLEST, len(_LEFT))
        return self._rich.console.width - sum(widths) - len(widths)

    def _fit(self) -> None:
        """Sets the width: rich queries stdin, stdout and stderr, and the terminal may be none of them."""
        try:
            width, height = os.get_terminal_size(self.screen.fileno())
        except (OSError, ValueError):
            return
        if width and height:
            self._rich.console.size = (width, height)
