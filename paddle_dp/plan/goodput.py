"""Goodput of a run that was restarted: the share of its wall time in updates that count in the end.

It is read from the lines of metrics.jsonl, which keeps no line of an update that a later attempt has repeated. In the
literature: runtime goodput (Google Cloud's "ML Productivity Goodput", 2024), and the effective training time ratio of
Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (2024).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.errors import StoppedError
from paddle_dp.text import duration, plural

_START = b'{"event": "start"'  # the beginning of an attempt's first line


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Seconds of a run: `seconds` by the clock on the wall, from the start of its first job to its last update, of
    these `updating` in the `updates` that count, and `restarting` from the job's start, or from an attempt's last
    update that counts, to the beginning of the next attempt. The rest are evaluations, checkpoints and other callbacks.

    Time after the last update is in none of these, so that a reader at the training's end sees the same as a later one.
    Nor is a pause after a training that ended well or was asked to stop: nobody waited for it. Updates since the last
    checkpoint count until another attempt repeats them.
    """

    attempts: int
    updates: int
    updating: float
    restarting: float
    seconds: float

    @property
    def share(self) -> float:
        """Goodput, from 0 to 1."""
        return min(self.updating / self.seconds, 1.0) if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        """ "goodput 71%: of 120 s in 3 attempts, 85.2 s went into the 1200 updates that count, …"."""
        other = max(self.seconds - self.updating - self.restarting, 0.0)
        return (
            f"goodput {self.share:.0%}: of {timespan(self.seconds)} in {plural(self.attempts, 'attempt')}, "
            f"{timespan(self.updating)} went into the {plural(self.updates, 'update')} that count, "
            f"{timespan(self.restarting)} into starts and repeated updates, {timespan(other)} into checkpoints and "
            "other callbacks"
        )

    def as_fields(self) -> dict[str, float]:
        return {
            "goodput": round(self.share, 4), "attempts": self.attempts, "updates": self.updates,
            "seconds": round(self.seconds, 3), "seconds_updating": round(self.updating, 3),
            "seconds_restarting": round(self.restarting, 3),
        }  # fmt: skip


@dataclass(kw_only=True)
class _Attempt:
    """The lines of one attempt. `begin`: seconds since 1970 at its first update, `job`: at its job's start, which came
    after pauses of `pause` seconds that other lines do not show; `timed` updates took `timed_seconds`, the last of them
    until `timed_until`. `time` and `step`: of its last line. `is_over`: it ended well, or stopped by request.
    """

    first: int
    begin: float
    job: float
    pause: float
    step: int
    time: float
    timed_until: float
    timed: int = 0
    timed_seconds: float = 0.0
    is_over: bool = False

    def add(self, line: Mapping[str, Any]) -> None:
        """Reads a line after the attempt's `start`."""
        step = int(line["step"])
        rate = line.get("seconds_per_step")
        if line["event"] == "step" and isinstance(rate, float | int) and step > self.step_timed:
            self.timed_seconds += (step - self.step_timed) * rate
            self.timed += step - self.step_timed
            self.timed_until = float(line["time"])
        self.step, self.time = max(self.step, step), float(line["time"])
        self.is_over = self.is_over or _is_ending(line)

    @property
    def step_timed(self) -> int:
        """The step until which updates are timed."""
        return self.first + self.timed


def read_goodput(run: Path) -> Goodput | None:
    """The goodput of the run in a folder, from its metrics.jsonl. None without that file, or if one attempt began:
    a folder of logs proves none, as evaluations and exports have theirs."""
    path = run / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            if sum(line.startswith(_START) for line in file) < 2:
                return None
        with path.open("rb") as file:
            return goodput(_parsed(file))
    except OSError:
        return None


def _parsed(lines: Iterable[bytes]) -> Iterable[Mapping[str, Any]]:
    for text in lines:
        try:
            line = json.loads(text)
            if isinstance(line["event"], str) and isinstance(line["step"] + line["time"], float | int):
                yield line
        except (ValueError, KeyError, TypeError, RecursionError):  # half a line, or one of another program
            continue


def _is_ending(line: Mapping[str, Any]) -> bool:
    stopped = line["event"] == "failed" and line.get("kind") == StoppedError.__name__
    return stopped or line["event"] == "end"


def _job_begin(start: Mapping[str, Any]) -> float:
    """Seconds since 1970 at the start of the job that wrote the line."""
    return float(start["time"]) - float(start.get("job_seconds", 0.0))


def dropped_pause(dropped: Iterable[Mapping[str, Any]], start: Mapping[str, Any]) -> float:
    """Seconds of the pauses before an attempt whose `start` drops these lines, as it resumes from an earlier step: from
    each attempt that ended well or stopped by request to the next job. `goodput` reads them as `pause_seconds`."""
    pause, ended = 0.0, math.inf
    for line in (*dropped, start):
        if line["event"] == "start":
            pause += float(line.get("pause_seconds", 0.0)) + max(_job_begin(line) - ended, 0.0)
            ended = math.inf
        elif _is_ending(line):
            ended = float(line["time"])
    return pause


def goodput(lines: Iterable[Mapping[str, Any]]) -> Goodput | None:
    """The goodput of `lines` of metrics.jsonl; None without a timed update.

    Updates between an attempt's last timed line and the step from which the next attempt begins take the mean time.
    """
    rows: list[_Attempt] = []
    for line in lines:
        if line["event"] == "start":
            time, step = float(line["time"]), int(line["step"])
            job, pause = _job_begin(line), float(line.get("pause_seconds", 0.0))
            rows.append(
                _Attempt(first=step, begin=time, job=job, pause=pause, step=step, time=time, timed_until=time)
            )
        elif rows:
            rows[-1].add(line)
    timed = sum(row.timed for row in rows)
    if not timed:
        return None
    rate = sum(row.timed_seconds for row in rows) / timed
    updates, updating = 0, 0.0
    restarting = pauses = 0.0
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        counted = max((after.first if after else row.step) - row.first, 0)
        updates += counted
        updating += row.timed_seconds + (counted - row.timed) * rate
        if after is not None:
            pause = after.pause + (max(after.job - row.time, 0.0) if row.is_over else 0.0)
            last_update = row.time + max(row.first + counted - row.step, 0) * rate
            restarting += max(after.begin - last_update - pause, 0.0)
            pauses += pause
    restarting += rows[0].begin - rows[0].job
    end = rows[-1].timed_until + (rows[-1].step - rows[-1].step_timed) * rate
    return Goodput(
        attempts=len(rows), updates=updates, updating=updating, restarting=restarting,
        seconds=end - rows[0].job - pauses,
    )  # fmt: skip


def timespan(seconds: float, shortest: float = 600.0) -> str:
    """ "85.2 s", "12 min 5 s", "3 h 20 min"; in seconds alone if it is shorter than `shortest` of them."""
    if seconds < shortest:
        return duration(seconds) if seconds else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
