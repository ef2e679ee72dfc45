"""Runs a script under audit as a supervised job: on N ranks, and on one process with the N ranks' batches."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.audit.runner import VARIABLE
from paddle_dp.errors import EndedError
from paddle_dp.launch.attempts import Command, watched
from paddle_dp.launch.command import Job, environment, launcher
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.signals import Signals
from paddle_dp.launch.supervisor import Outside

RUNNER = Path(__file__).with_name("runner.py")
GRACE = 30.0  # seconds beyond its patience for a rank whose own guard cannot run
STARTUP = 60.0  # seconds for Python, paddle and the launcher to start, before the first event


@dataclass(frozen=True)
class Script:
    """A script with its arguments; `steps` updates of each pass are recorded; `patience` in seconds."""

    path: Path
    arguments: tuple[str, ...]
    steps: int
    patience: float

    def run(self, ranks: int, folder: Path, replay: Mapping[str, Any] | None = None) -> Failure | int:
        """Runs the script on `ranks` ranks, which write their events to `folder`. Raises EndedError on a signal.

        `replay`: the updates that one process is to repeat (see hooks/replay.py).
        """
        folder.mkdir(mode=0o700)
        plan = plan_of(Job(script=(str(self.path), *self.arguments), ranks=ranks, quiet=True), Machine.here())
        options = {"folder": str(folder), "steps": self.steps, "patience": self.patience, "replay": replay}
        variables = environment(plan, os.environ) | {VARIABLE: json.dumps(options)}
        words = [*launcher(plan, folder), str(RUNNER), str(self.path), *self.arguments]
        with Signals() as signals:
            outside = Outside(signals=signals, must_end=self._stalled(folder))
            outcome, _ = watched(Command(words=words, variables=variables), plan, folder, outside)
        if signals.number:
            raise EndedError(signals.number)
        return outcome

    def _stalled(self, folder: Path) -> Any:
        """A function for the supervisor: whether no rank has recorded an event for longer than its guard allows."""
        began = time.time()

        def stalled() -> bool:
            newest = max(
                (path.stat().st_mtime for path in folder.glob("rank-*.jsonl")), default=began + STARTUP
            )
            return time.time() - max(newest, began) > self.patience + GRACE

        return stalled
