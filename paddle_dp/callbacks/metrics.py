"""Writes every event as one line of JSON to <run>/metrics.jsonl, for other programs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.callbacks._files import Journal
from paddle_dp.checkpoint.disk import open_regular, replace
from paddle_dp.errors import CheckpointError, message_of
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.plan.goodput import dropped_pause
from paddle_dp.train import Callback, Evaluation, Moment, Refusal, Run
from paddle_dp.train.evaluation import as_json
from paddle_dp.train.judge import as_fields
from paddle_dp.units import Every

if TYPE_CHECKING:
    from paddle_dp.train.callback import StepMeasurement

# A step's line as written here; parsing with json takes three times as long, which matters in a file of 2 GB.
_STEP = re.compile(rb'\{"event": "step", "epoch": \d+, "step": (\d+), [^{}]*\}\n')
_CHUNK = 1 << 20  # bytes written at once


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often to write a step; evaluations, checkpoints, starts and ends are always written."""

    def build(self, run: Run) -> Callback:
        return Metrics(run, self.every)


class Metrics(Callback):
    """Writes {"event": …, "epoch", "step", …}. Events: start, step, refused, epoch, measured, evaluated, saved,
    save_failed, end, failed.

    Only the main rank writes; the others have no journal.
    """

    weights = False

    def __init__(self, run: Run, every: Every):
        self.run, self.every = run, every
        self.path = run.folder / "metrics.jsonl"
        self._journal: Journal | None = None
        self._written: set[tuple[str, int]] = set()  # events from before the resume
        self._dropped: list[dict[str, Any]] = []  # starts and ends of attempts after its step
        self._began = time.time()

    def start(self, moment: Moment) -> None:
        if not self.run.mesh.is_main:
            return
        self.run.folder.mkdir(parents=True, exist_ok=True)
        self._open(moment.progress.step)
        self._began = time.time()
        mesh = self.run.mesh
        facts = {
            "name": self.run.name, "ranks": mesh.ranks, "device": mesh.displayed_device, "host": mesh.host,
            # Since the job's start, for its goodput.
            "job_seconds": round(time.monotonic() - heartbeat.born, 3),
            "total_steps": moment.trainer.total_steps, "steps_per_epoch": self.run.steps_per_epoch,
        }  # fmt: skip
        if (nodes := int(os.environ.get("PADDLE_NNODES", "1"))) > 1:
            facts["nodes"] = nodes
        if pause := dropped_pause(self._dropped, {"event": "start", "time": self._began, **facts}):
            facts["pause_seconds"] = round(pause, 3)
        self._write(moment, facts)

    def _open(self, step: int) -> None:
        """Opens the journal and drops its lines of steps after `step`."""
        self._written, self._dropped = set(), []
        replace(self.path, self._lines_until(step))
        self._journal = Journal(self.path)

    def _lines_until(self, step: int) -> Iterator[bytes]:
        """Yields the file's complete lines up to `step`, in chunks, as there may be millions. Later steps will be
        repeated."""
        if not self.path.exists():
            return
        lines, size = [], 0
        with io.BufferedReader(open_regular(self.path)) as file:
            for text in file:
                try:
                    if flat := _STEP.fullmatch(text):
                        event, at = "step", int(flat[1])
                    else:
                        line = json.loads(text)
                        event, at = line["event"], line["step"]
                        if at > step and event in ("start", "end", "failed"):
                            self._dropped.append({**line, "time": float(line["time"])})
                    if at > step or not isinstance(event, str):
                        continue
                except (ValueError, KeyError, TypeError):
                    continue
                if event in ("epoch", "evaluated"):
                    self._written.add((event, at))
                lines.append(text if text.endswith(b"\n") else text + b"\n")
                size += len(text)
                if size > _CHUNK:
                    yield b"".join(lines)
                    lines, size = [], 0
        yield b"".join(lines)

    def step(self, moment: Moment) -> None:
        self._write(moment, moment.numbers)

    def epoch(self, moment: Moment) -> None:
        self._write(moment, {})

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        if self._journal is not None and refusal.action == "rewind":
            with contextlib.suppress(OSError):  # on a full disk, repeated steps appear twice
                self._open(moment.progress.step)
                if self._dropped:  # the last of them is this attempt's start
                    *before, start = self._dropped
                    at = {key: getattr(moment.progress, key) for key in ("epoch", "step", "samples")}
                    pause = {"pause_seconds": round(dropped_pause(before, start), 3)}
                    self._journal.add(as_json(start | at | pause).encode())
        self._write(moment, as_fields(refusal))

    def measured(self, moment: Moment, measured: StepMeasurement) -> None:
        self._write(moment, measured.as_fields())

    def evaluated(self, moment: Moment, evaluation: Evaluation) -> None:
        self._write(moment, {**evaluation.numbers, "held_out": evaluation.samples})

    def saved(self, moment: Moment, path: Path) -> None:
        self._write(moment, {"checkpoint": path.name, **moment.numbers})

    def save_failed(self, moment: Moment, error: CheckpointError) -> None:
        self._write(moment, {"message": str(error)})

    def end(self, moment: Moment) -> None:
        self._write(moment, {"stopped": moment.trainer.early_end})

    def failed(self, moment: Moment, error: BaseException) -> None:
        self._write(moment, {"kind": type(error).__name__, "message": message_of(error)})

    def _write(self, moment: Moment, more: Mapping[str, Any]) -> None:
        """Adds a line whose `event` is the moment's name: "step", "measured", "evaluated" …"""
        now, progress = time.time(), moment.progress
        # A resumed run may repeat events of the step from which it continues.
        if self._journal is None or (moment.name, progress.step) in self._written:
            return
        line: dict[str, Any] = {
            "event": moment.name, "epoch": progress.epoch, "step": progress.step, "samples": progress.samples,
            "time": round(now, 3), "seconds": round(now - self._began, 3),
        }  # fmt: skip
        line |= {key: value for key, value in more.items() if key not in line}
        self._journal.add(as_json(line).encode())
