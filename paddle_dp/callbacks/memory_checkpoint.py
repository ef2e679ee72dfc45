"""Keeps the last two checkpoints in this machine's memory, for the restarts of a job: a restart repeats few steps."""

from __future__ import annotations

import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from paddle_dp import checkpoint as checkpoints
from paddle_dp.checkpoint import NotWrittenError
from paddle_dp.errors import UsageError
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.plan.memory import states_of
from paddle_dp.tensors import nbytes
from paddle_dp.text import amount
from paddle_dp.train import Callback, Moment, Refusal, Run
from paddle_dp.units import Every

COUNT = 2  # checkpoints: a kill in mid-write leaves one


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often to save to memory."""

    def build(self, run: Run) -> Callback:
        return MemoryCheckpointCallback(run, self)


class MemoryCheckpointCallback(Callback):
    """Saves checkpoints, on all ranks together, to the folder in memory that `paddle-dp` has made for the job
    (launch/memory.py): the files of a checkpoint on disk, with the same checks before and after.

    A restart begins at the newest whole one of disk and memory. At the end of the job, however it ends, the memory is
    freed: nothing but a restart of this job reads it. Memory that is full does not end the training.
    """

    reads = False

    def __init__(self, run: Run, config: Config):
        self.run, self.every, self._interval = run, config.every, config.every
        folder = os.environ.get(MEMORY, "")
        self.folder = Path(folder, "checkpoints") if folder else None
        self._newest: Path | None = None  # whole and good
        self._disk_step = -1  # of the last checkpoint on disk, which need not be written twice
        self._refused_for = ""  # why the last one was not written; "" if it was

    def refuse(self, moment: Moment) -> None:
        if self.folder is None:
            raise UsageError(
                "callbacks.memory_checkpoint serves the restarts of `paddle-dp train RECIPE --restarts N`, which makes "
                "its folder in memory and removes it: this training was started otherwise. Leave it out."
            )
        size = self._size(moment)
        free = self.run.mesh.gather(shutil.disk_usage(self.folder.parent).free)[0]  # the ranks must agree
        if COUNT * size > free:
            raise UsageError(
                f"callbacks.memory_checkpoint keeps {COUNT} checkpoints of about {amount(size)} each in "
                f"{self.folder.parent.parent}, where {amount(free)} are free. Make it larger (mount -o remount,size=…, "
                "or docker run --shm-size=…), or leave the callback out and save to disk more often "
                "(callbacks.checkpoint.every)."
            )

    def _size(self, moment: Moment) -> int:
        """The bytes of one checkpoint: weights, buffers, averages, and the states that the optimizer will have.
        Collective."""
        shards = [tensor for _, tensor, _ in moment.trainer.learner.placed.shards()]
        trained = sum(math.prod(tensor.shape) for tensor in shards if not tensor.stop_gradient)
        recipe, numbers = self.run.recipe, 2
        if recipe is not None:
            numbers = states_of(recipe.optimizer.config) + (recipe.ema is not None)
            numbers += recipe.train.precision.level == "O2"  # a float32 copy of each weight
        return round(self.run.mesh.sum([sum(map(nbytes, shards)) + 4 * numbers * trained])[0])

    def due_at_epoch(self, epochs: int) -> bool:
        return self._interval.due_at_epoch(epochs)

    def start(self, moment: Moment) -> None:
        assert self.folder is not None, "refuse has looked"
        if self.run.mesh.is_main:
            checkpoints.clean(self.folder)
        resumed = self.run.resumed
        if resumed is not None and resumed.folder.parent.resolve() == self.folder.resolve():
            self._newest = resumed.folder

    def step(self, moment: Moment) -> None:
        self._save(moment)

    def epoch(self, moment: Moment) -> None:
        self._save(moment)

    def saved(self, moment: Moment, path: Path) -> None:
        self._disk_step = checkpoints.step_of(path)

    def interrupted(self, moment: Moment) -> None:
        """The job may go on at once, with another number of ranks."""
        self._save(moment)

    def refused(self, moment: Moment, refusal: Refusal) -> None:
        """After a rewind the checkpoints of later steps belong to a past that the training has left."""
        if refusal.action != "rewind" or self.folder is None:
            return
        self._newest = None
        for path in checkpoints.checkpoints(self.folder) if self.run.mesh.is_main else ():
            if checkpoints.step_of(path) > moment.progress.step:
                shutil.rmtree(path, ignore_errors=True)

    def _save(self, moment: Moment) -> None:
        """Saves this step, unless that is done. Collective."""
        assert self.folder is not None, "refuse has looked"
        step, mesh = moment.progress.step, self.run.mesh
        newest_step = -1 if self._newest is None else checkpoints.step_of(self._newest)
        if step in (newest_step, self._disk_step):
            return
        with heartbeat.within("checkpoint", "in memory"):
            snapshot = moment.trainer.snapshot()
            if mesh.is_main:  # before the next one: two of them at most take memory
                checkpoints.prune(self.folder, COUNT - 1, trusted=self._newest)
            try:
                self._newest = checkpoints.save(snapshot, self.folder, mesh, slow=False)
            except NotWrittenError as error:
                reason = error.reason or error.message
                if mesh.is_main and reason != self._refused_for:
                    line = (
                        f"step {step} is not kept in memory: {reason} ({self.folder}). The training goes on."
                    )
                    print(line, file=sys.stderr, flush=True)
                self._refused_for = reason
            else:
                self._refused_for = ""
