"""A trial: one training in a run folder of the sweep, its process, and its evaluations as they are written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paddle_dp.errors import StoppedError
from paddle_dp.launch.logs import tail
from paddle_dp.launch.processes import child_options, kill_tree
from paddle_dp.report.run_record import METRICS, number

SCREENS = "screens"  # in the sweep's folder: what each trial printed

Evaluation = tuple[int, int, float]
"""Samples, step and score."""


def folder_of(sweep: Path, trial: int) -> Path:
    return sweep / f"trial-{trial:03d}"


class RunningTrial(Protocol):
    """A training that was started somewhere."""

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def stop(self) -> None:
        """Asks it to save a checkpoint and end."""

    def kill(self) -> None:
        """Ends it at once, with all its processes."""


class Executor(Protocol):
    """Starts trials: here, or on other machines that share the sweep's folder."""

    def start(self, arguments: Sequence[str], slot: int, screen: Path) -> RunningTrial:
        """Starts `paddle-dp ARGUMENTS` in one of the sweep's slots; what it prints is appended to `screen`."""


class LocalTrial(subprocess.Popen[bytes]):
    """A training in a process of this machine."""

    stop = subprocess.Popen.terminate

    def kill(self) -> None:
        kill_tree(self)


@dataclass(frozen=True, kw_only=True)
class LocalExecutor:
    """Starts trials on this machine. `devices`: of each slot; () on CPUs. `threads`: of each rank.

    `environment` is this process's before it imported Paddle, which changes it.
    """

    environment: Mapping[str, str]
    threads: int
    devices: Sequence[tuple[str, ...]] = ()

    def start(self, arguments: Sequence[str], slot: int, screen: Path) -> RunningTrial:
        command = [sys.executable, "-m", "paddle_dp", *arguments]
        if self.devices:
            command += ["--devices", ",".join(self.devices[slot])]
        variables = {} if self.devices else {"OMP_NUM_THREADS": str(self.threads)}
        variables |= self.environment
        screen.parent.mkdir(exist_ok=True)
        with screen.open("ab") as output:
            return LocalTrial(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                **child_options(),
            )  # fmt: skip


class Evaluations:
    """The evaluations of a run, read from metrics.jsonl as it grows.

    It is made before the training starts: a resumed training replaces the file, without the lines after its checkpoint,
    so a file that was there before is not read while the training runs.
    """

    def __init__(self, run: Path, score: str):
        self.score, self._path = score, run / METRICS
        self.total_steps = 0
        self.points: list[Evaluation] = []
        self._stale, self._inode, self._offset = _inode_of(self._path), 0, 0

    def read(self, is_over: bool) -> list[Evaluation]:
        """Reads new lines and returns their evaluations; once the training is over, also of a stale file."""
        inode = _inode_of(self._path)
        if not inode or (inode == self._stale and not is_over):
            return []
        if inode != self._inode:
            self._inode, self._offset = inode, 0
            self.points.clear()
        first = len(self.points)
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            if line.startswith((b'{"event": "evaluated"', b'{"event": "start"')):
                self._note(line)
        return self.points[first:]

    def _note(self, line: bytes) -> None:
        event = _event_of(line)
        self.total_steps = int(event.get("total_steps") or self.total_steps)
        value = number(event.get(self.score))
        if event.get("event") == "evaluated" and value is not None:
            self.points.append((int(event["samples"]), int(event["step"]), value))


def best_of(points: Sequence[Evaluation], smaller: bool) -> tuple[float, int] | None:
    """The best score and its step; of equal ones the first."""
    if not points:
        return None
    _, step, value = (min if smaller else max)(points, key=lambda point: point[2])
    return value, step


def _inode_of(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def resume_point(run: Path) -> str | None:
    """The step of the checkpoint that a stopped or killed training goes on from, for --resume; None without one.

    A training that evaluates saves its best checkpoint before it writes the evaluation's line. After a kill between the
    two that line would be missing for good: a checkpoint counts if metrics.jsonl has what followed, or an orderly stop.
    """
    names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    last, complete = -1, set()
    try:
        lines = (run / METRICS).read_bytes().splitlines()
    except OSError:
        return None
    for event in filter(None, map(_event_of, lines)):
        last = max(last, event["step"])
        if event["event"] == "evaluated" or event.get("kind") == StoppedError.__name__:
            complete.add(event["step"])
    steps = [step for name in names if name.isdecimal() and (last > (step := int(name)) or step in complete)]
    return str(max(steps)) if steps else None


def _event_of(line: bytes) -> dict[str, Any]:
    """The event of a line of metrics.jsonl; {} if there is none."""
    try:
        event = json.loads(line)
    except ValueError:  # cut off by a kill
        return {}
    is_event = isinstance(event, dict) and "event" in event and type(event.get("step")) is int
    return event if is_event else {}


def last_line(screen: Path) -> str:
    """The last line that a trial printed, which names the cause of a failure."""
    lines = tail(screen, 100).splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
