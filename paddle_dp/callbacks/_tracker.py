"""The walk of trackers of experiments: the dashboard's numbers, tags and steps, written by a package that may fail.

A tracker's file has its settings and its run, a `TrackerRun`. A tracker never ends a training, nor changes it: what it
raises is a sentence on the screen, after which the training goes on without it; and random numbers and the handlers of
signals are as before after each call.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from paddle_dp.callbacks import dashboard
from paddle_dp.callbacks.dashboard.visualdl import flat_settings
from paddle_dp.checkpoint.disk import replace
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.errors import InstallError, clipped, message_of
from paddle_dp.train import Moment

Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrackerRun(Protocol):
    """A run that a tracker's package writes; its methods may raise anything. `written`: the tags that it has already at
    the step from which it goes on."""

    written: frozenset[str]

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Writes numbers and the results of the next three methods by tag."""

    def text(self, text: str) -> Any: ...

    def picture(self, png: bytes) -> Any: ...

    def histogram(self, counts: Any, edges: Any) -> Any: ...

    def finish(self, failure: BaseException | None) -> None:
        """Ends the run. `failure`: the error that ended the training, such as a StoppedError."""


class TrackerLog:
    """The log of a tracker as a `CurveLog`, which raises nothing; `begin` begins its run, after `step`."""

    def __init__(self, name: str, step: int, begin: Callable[[], TrackerRun]):
        self._name, self._begun_step = name, step
        self._run: TrackerRun | None = None
        self._complained = False
        self._run = self._attempt(begin, greets=True)

    def scalars(self, numbers: Mapping[str, float], step: int) -> None:
        self._log(step, {tag: float(number) for tag, number in numbers.items()})

    def text(self, tag: str, text: str, step: int) -> None:
        self._make(tag, step, lambda run: run.text(text))

    def picture(self, tag: str, png: bytes, step: int) -> None:
        self._make(tag, step, lambda run: run.picture(png))

    def histogram(self, tag: str, counts: Any, edges: Any, step: int) -> None:
        self._make(tag, step, lambda run: run.histogram(counts, edges))

    def settings(self, settings: Mapping[str, int | float | str], tags: list[str]) -> None:
        """Trackers get the settings when their run begins."""

    def finish(self, failure: BaseException | None = None) -> None:
        """Ends the tracker's run; further entries are dropped."""
        if (run := self._run) is not None:
            self._attempt(lambda: run.finish(failure), greets=True)
            self._run = None

    def _make(self, tag: str, step: int, make: Callable[[TrackerRun], Any]) -> None:
        if (run := self._run) is not None:
            value = self._attempt(lambda: make(run))
            self._log(step, {} if value is None else {tag: value})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values, except those that the run already has (repeated at the step of a resume)."""
        run = self._run
        if run is not None and step == self._begun_step:
            values = {tag: value for tag, value in values.items() if tag not in run.written}
        if run is not None and values:
            self._attempt(lambda: run.log(values, step))

    def _attempt(self, action: Callable[[], Result], greets: bool = False) -> Result | None:
        """The action's result; None after a failure, which ends the tracking. `greets`: its output is no complaint."""
        output = io.StringIO()
        try:
            with _undisturbed(output):
                result = action()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a training
            self._run = None
            reason = message_of(error).rstrip(".")
            self._print(f"failed: {reason}. The training goes on without it.")
            return None
        if not greets and output.tell() and not self._complained:
            self._complained = True
            self._print(f"complains: {clipped(output.getvalue().strip())}")
        return result

    def _print(self, sentence: str) -> None:
        print(f"The tracker {self._name} {sentence}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _undisturbed(output: TextIO) -> Iterator[None]:
    """Restores random numbers and the handlers of signals and of exceptions afterwards, and sends standard output and
    warnings, by which packages tell that entries are lost, to `output`."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    hook = sys.excepthook
    try:
        with (
            restoring_globals(),
            contextlib.redirect_stdout(output),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            yield
        output.write("".join(f"{warning.message}\n" for warning in caught))
    finally:
        sys.excepthook = hook
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


class Tracker(dashboard.Dashboard):
    """Writes the dashboard's curves, texts and pictures into the run of a tracker."""

    name = ""  # of the package

    @abstractmethod
    def begin_run(self, step: int, settings: Mapping[str, int | float | str]) -> TrackerRun:
        """Begins a run with the recipe's settings, or goes on with this folder's run after `step`. Imports the package:
        it is called undisturbed."""

    def open_log(self, step: int) -> TrackerLog:
        self._finish()  # of the steps before the training went back
        recipe = self.run.recipe
        settings = {} if recipe is None else flat_settings(recipe.model_dump(mode="json"))
        return TrackerLog(self.name, step, lambda: self.begin_run(step, settings))

    def end(self, moment: Moment) -> None:
        super().end(moment)
        self._finish()

    def failed(self, moment: Moment, error: BaseException) -> None:
        self._finish(error)

    def _finish(self, failure: BaseException | None = None) -> None:
        if isinstance(self.log, TrackerLog):
            self.log.finish(failure)


def refuse_without(package: str) -> None:
    """Raises InstallError if a tracker's package is not installed. The extra has its name."""
    if find_spec(package) is None:
        raise InstallError(
            f"callback {package} needs the package {package}: pip install 'paddle_dp[{package}]', or {package} alone"
        )


def run_id(file: Path, new: Callable[[], str]) -> tuple[str, bool]:
    """The id of this folder's run, kept in `file` or else `new`, and whether it is known from before."""
    if file.is_file() and (text := file.read_text().strip()):
        return text, True
    file.parent.mkdir(parents=True, exist_ok=True)
    text = new()
    replace(file, f"{text}\n".encode())
    return text, False
