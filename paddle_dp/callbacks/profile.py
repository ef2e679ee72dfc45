"""Records a window of steps with paddle.profiler: a trace for ui.perfetto.dev, and a table of operator times.

The trace is rewritten into the Trace Event Format that Perfetto reads (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): Paddle 3.3.1 writes a text as the thread's number (tid "123(C++)"), the
duration into every name ("relu[3.1 us]", which prevents sums by name), and an empty event at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from paddle_dp.callbacks import _lines
from paddle_dp.train import Callback, Moment, Refusal, Run
from paddle_dp.units import Count, Positive

_DURATION = re.compile(r"\[[0-9.]+ [a-z]+\]$")


def tidied(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with one name per operator and a number per thread (threads keep their `thread_name`)."""
    threads: dict[Any, int] = {}
    return [
        {
            **event,
            "name": _DURATION.sub("", event["name"]),
            "tid": threads.setdefault((event.get("pid"), event.get("tid")), len(threads) + 1),
        }
        for event in events
        if "ph" in event
    ]


@dataclass(frozen=True, kw_only=True)
class Config:
    start: Count = 10
    """Number of steps before the window: the first steps are slower."""

    steps: Positive = 10
    """Number of steps in the window."""

    all_ranks: bool = False
    """Record all ranks, not only rank 0."""

    def build(self, run: Run) -> Callback:
        return Profile(run, self)


class Profile(Callback):
    """Writes <run>/profile/rank-N.json and rank-N.txt at the end of the window or of the training."""

    reads, weights = False, False

    def __init__(self, run: Run, config: Config):
        self.run, self.config = run, config
        self.folder = run.folder / "profile"
        self._records = config.all_ranks or run.mesh.is_main
        self._first = 0
        self._profiler: Any = None

    def due_at_step(self, step: int) -> bool:
        return self._first <= step <= self._first + self.config.steps

    def start(self, moment: Moment) -> None:
        self._first = moment.progress.step + self.config.start
        self._at(moment.progress.step)

    def step(self, moment: Moment) -> None:
        self._at(moment.progress.step)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if refusal.action == "rewind" and self._profiler is not None:  # Paddle has one profiler at a time
            self._profiler.stop()
            self._profiler, self._first = None, max(self._first, moment.progress.step)
            self._at(moment.progress.step)

    def end(self, moment: Moment) -> None:
        if self._profiler is not None:
            self._finish()
        elif self._records and moment.progress.step <= self._first:
            print(_lines.nothing_recorded("profile", self._first), flush=True)

    def failed(self, moment: Moment, error: BaseException) -> None:
        if self._profiler is not None:
            self._finish()

    def _at(self, step: int) -> None:
        """Starts, continues or ends the recording after `step` updates."""
        if self._records and step == self._first:
            self._begin()
        elif self._profiler is not None:
            if step >= self._first + self.config.steps:
                self._finish()
            else:
                self._profiler.step()

    def _begin(self) -> None:
        from paddle import profiler

        target = profiler.ProfilerTarget
        kinds = {"cpu": target.CPU, "gpu": target.GPU, "xpu": target.XPU}
        here = kinds.get(self.run.mesh.device.partition(":")[0], target.CUSTOM_DEVICE)
        targets = list(dict.fromkeys([target.CPU, here]))
        # The profiler would call a scheduler at every step of the training, so it gets none.
        self._profiler = profiler.Profiler(targets=targets, on_trace_ready=lambda _: None)
        self._profiler.start()

    def _finish(self) -> None:
        recorded, self._profiler = self._profiler, None
        recorded.stop()
        try:
            self._write(recorded)
        except OSError as error:  # the training continues without it
            print(f"{self.folder} was not written: {error.strerror}.", file=sys.stderr, flush=True)

    def _write(self, recorded: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self.run.mesh.rank}"
        trace = self.folder / f"{name}.json"
        recorded.export(str(trace), format="json")
        content = json.loads(trace.read_text())
        content["traceEvents"] = tidied(content["traceEvents"])
        trace.write_text(json.dumps(content))
        table = io.StringIO()
        with contextlib.redirect_stdout(table):
            recorded.summary()
        (self.folder / f"{name}.txt").write_text(table.getvalue())
