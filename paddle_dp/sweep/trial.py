"""A trial: one training in a run folder of the sweep, its process, and its evaluations as they are written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paddle_dp.errors import StoppedError
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


class LocalTrial:
    """A training in a process of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        kill_tree(self.process)


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
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                **child_options(),
            )  # fmt: skip
        return LocalTrial(process)


@dataclass
class Evaluations:
    """The evaluations of a run, read from metrics.jsonl as it grows.

    A resumed training replaces the file, without the lines after its checkpoint, so a file that was there before it
    (`stale`, an inode) is not read while the training runs.
    """

    run: Path
    score: str
    stale: int = 0
    total_steps: int = 0
    points: list[Evaluation] = field(default_factory=list)
    _inode: int = 0
    _offset: int = 0

    @classmethod
    def before_training(cls, run: Path, score: str) -> Evaluations:
        return cls(run, score, stale=_inode_of(run / METRICS))

    def read(self, is_over: bool) -> list[Evaluation]:
        """Reads new lines and returns their evaluations; once the training is over, also of a stale file."""
        path = self.run / METRICS
        inode = _inode_of(path)
        if not inode or (inode == self.stale and not is_over):
            return []
        if inode != self._inode:
            self._inode, self._offset = inode, 0
            self.points.clear()
        first = len(self.points)
        with path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            if line.startswith((b'{"event": "evaluated"', b'{"event": "start"')):
                self._note(line)
        return self.points[first:]

    def _note(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        self.total_steps = int(event.get("total_steps") or self.total_steps)
        value = number(event.get(self.score))
        if event["event"] == "evaluated" and value is not None:
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
    for line in _lines(run / METRICS):
        last = max(last, line["step"])
        if line["event"] == "evaluated" or line.get("kind") == StoppedError.__name__:
            complete.add(line["step"])
    steps = [step for name in names if name.isdecimal() and (last > (step := int(name)) or step in complete)]
    return str(max(steps)) if steps else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_bytes()
    except OSError:
        return
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # cut off by the kill
            continue
        if isinstance(event, dict) and "event" in event and type(event.get("step")) is int:
            yield event


def last_line(screen: Path) -> str:
    """The last line that a trial printed, which names the cause of a failure."""
    try:
        with screen.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
