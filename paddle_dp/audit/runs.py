"""A foreign script as a watched job: on N ranks, and once more on one process that is fed with what those ranks had."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.audit.runner import VARIABLE
from paddle_dp.errors import EndedError
from paddle_dp.launch.command import Job, environment
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.plan import plan_of
from paddle_dp.launch.start import watched

RUNNER = Path(__file__).with_name("runner.py")
LATE = 30.0  # seconds that a rank which cannot even run its own guard gets beyond its patience
STARTING = (
    60.0  # seconds in which nothing needs to have been written yet: Python, paddle and the launcher start
)


@dataclass(frozen=True)
class Script:
    """A script, its arguments, and how patiently it is run; `steps` updates of each pass are watched."""

    path: Path
    arguments: tuple[str, ...]
    steps: int
    patience: float

    def run(self, ranks: int, folder: Path, again: Mapping[str, Any] | None = None) -> Failure | int:
        """Runs the script on `ranks` ranks; what they saw is in `folder` afterwards. Raises EndedError on a signal.

        `again` says what the one process is to be fed with (see hooks/replay.py).
        """
        folder.mkdir(mode=0o700)
        plan = plan_of(Job(recipe=self.path, ranks=ranks, quiet=True), Machine.here())
        what = {"folder": str(folder), "steps": self.steps, "patience": self.patience, "replay": again}
        variables = environment(plan, os.environ) | {VARIABLE: json.dumps(what)}
        words = [sys.executable, "-u", "-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks)]
        words += ["--log_dir", str(folder), "--job_id", "audit"]
        words += ["--devices", ",".join(plan.gpus)] if plan.gpus else []
        command: Sequence[str] = [*words, str(RUNNER), str(self.path), *self.arguments]
        outcome, _, told = watched(command, plan, folder, variables, None, self._stalled(folder))
        if told.number:
            raise EndedError(told.number)
        return outcome

    def _stalled(self, folder: Path) -> Any:
        """A question for the supervisor: has no rank written anything for longer than its own guard would allow?"""
        began = time.time()

        def stalled() -> bool:
            newest = max(
                (path.stat().st_mtime for path in folder.glob("rank-*.jsonl")), default=began + STARTING
            )
            return time.time() - max(newest, began) > self.patience + LATE

        return stalled
