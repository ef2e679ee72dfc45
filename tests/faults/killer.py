"""Callbacks that do to a training what others do: kill a rank, or leave a process behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from paddle_dp.train import Callback, Moment, Run
from tests.faults.entry_points import leave_a_child_behind


class KillsRank1Once(Callback):
    """Kills rank 1, or the only rank, after an update, unless the file `note` says that this has been done."""

    reads = False

    def __init__(self, run: Run | None, step: int, note: str):
        self.at, self.note = step, Path(note)

    def due_at_step(self, step: int) -> bool:
        return step == self.at

    def step(self, moment: Moment) -> None:
        mesh = moment.trainer.mesh
        if mesh.rank == min(1, mesh.ranks - 1) and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class LeavesAChild(Callback):
    """Each rank starts a process that would go on for ever, whose number is in `folder`/child.RANK then."""

    reads = False

    def __init__(self, run: Run | None, folder: str):
        self.folder = folder

    def due_at_step(self, step: int) -> bool:
        return step == 1

    def step(self, moment: Moment) -> None:
        leave_a_child_behind(None, {"pids": self.folder})
