"""Keeps the last two checkpoints in memory, on several nodes also in the next node's: a restart repeats few steps."""

from __future__ import annotations

import math
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paddle_dp import checkpoint as checkpoints
from paddle_dp.callbacks import _schedule_state
from paddle_dp.checkpoint import NotWrittenError, node_copies
from paddle_dp.checkpoint.node_copies import Ring
from paddle_dp.errors import UsageError
from paddle_dp.mesh.environment import MEMORY
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.plan.memory import states_of
from paddle_dp.tensors import nbytes
from paddle_dp.text import amount, numbered
from paddle_dp.train import Callback, Moment, Refusal, Run
from paddle_dp.units import Every

COUNT = 2  # checkpoints: a kill in mid-write leaves one


@dataclass(frozen=True, kw_only=True)
class Config:
    every: Every = Every.parse("10 steps")
    """How often to save to memory."""

    needs_job = True

    def build(self, run: Run) -> Callback:
        return MemoryCheckpointCallback(run, self)


class MemoryCheckpointCallback(Callback):
    """Saves checkpoints, on all ranks together, to the folder in memory that `paddle-dp` has made for the job
    (launch/memory.py): the files of a checkpoint on disk, with the same checks before and after.

    On several nodes each has the files of its ranks and copies of the previous node's (checkpoint/node_copies.py).
    A restart begins at the newest whole one of disk and memory. At the end of the job, however it ends, the memory is
    freed: nothing but a restart of this job reads it. Memory that is full does not end the training.
    """

    reads = False
    saves_at_end = True

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
        _schedule_state.refuse_unsaved(moment)
        mesh, parent = self.run.mesh, self.folder.parent.parent
        free_here = shutil.disk_usage(self.folder.parent).free
        # A restart meets the job's earlier checkpoints there, which give way.
        free_here += sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        sizes, free = zip(*mesh.gather([self._size(moment), free_here]), strict=True)
        for ranks, room in zip(self._ring.nodes, self._ring.rooms(sizes, COUNT), strict=True):
            if room <= free[ranks[0]]:
                continue
            content = f"{COUNT} checkpoints of about {amount(sum(sizes))} each in {parent}"
            if len(self._ring.nodes) > 1:
                content = (
                    f"{amount(room)} in {parent} on the node of {numbered('rank', ranks, 4)} (its files and the copies "
                    f"of the previous node's of {COUNT} checkpoints of about {amount(sum(sizes))}; a restart completes "
                    "one of them)"
                )
            raise UsageError(
                f"callbacks.memory_checkpoint keeps {content}, where {amount(free[ranks[0]])} are free. Make it larger "
                "(mount -o remount,size=…, or docker run --shm-size=…), or leave the callback out and save to disk "
                "more often (callbacks.checkpoint.every)."
            )

    @cached_property
    def _ring(self) -> Ring:
        """The ranks of each node. The first use is collective: a node is the ranks with one folder."""
        return Ring.from_memories(self.run.mesh.gather(str(self.folder)))

    @property
    def _writes_folder(self) -> bool:
        """True on the rank that removes the folders of its node's checkpoints."""
        return self._ring.first(self.run.mesh.rank) == self.run.mesh.rank

    def _size(self, moment: Moment) -> int:
        """The bytes of this rank's files of one checkpoint: weights, buffers, averages, and the states that the
        optimizer will have."""
        shards = [tensor for _, tensor, _ in moment.trainer.learner.placed.shards()]
        trained = sum(math.prod(tensor.shape) for tensor in shards if not tensor.stop_gradient)
        recipe, numbers = self.run.recipe, 2
        if recipe is not None:
            numbers = states_of(recipe)
            numbers += recipe.train.precision.level == "O2"  # a float32 copy of each weight
        return round(sum(map(nbytes, shards)) + 4 * numbers * trained)

    def due_at_epoch(self, epochs: int) -> bool:
        return self._interval.due_at_epoch(epochs)

    def start(self, moment: Moment) -> None:
        assert self.folder is not None, "refuse has looked"
        resumed = self.run.resumed
        if resumed is not None and resumed.folder.parent.resolve() == self.folder.resolve():
            self._newest = resumed.folder
        if not self._writes_folder:
            return
        checkpoints.clean(self.folder)
        # Files of another attempt must never complete this one's, nor be newer.
        for path in checkpoints.checkpoints(self.folder):
            if self._newest is None or path.name != self._newest.name:
                shutil.rmtree(path, ignore_errors=True)

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
        for path in checkpoints.checkpoints(self.folder) if self._writes_folder else ():
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
            if self._writes_folder:  # before the next one: two of them at most take memory
                checkpoints.prune(self.folder, COUNT - 1, trusted=self._newest)
            try:
                if len(self._ring.nodes) > 1:
                    self._newest = node_copies.save(snapshot, self.folder, mesh, self._ring)
                else:
                    self._newest = checkpoints.save(snapshot, self.folder, mesh, slow=False)
            except NotWrittenError as error:
                reason = error.reason or error.message
                if mesh.is_main and reason != self._refused_for:
                    # On several nodes the message names the rank whose node's memory it was.
                    cause = error.message if len(self._ring.nodes) > 1 else f"{reason} ({self.folder})."
                    line = f"step {step} is not kept in memory: {cause} The training goes on."
                    print(line, file=sys.stderr, flush=True)
                self._refused_for = reason
            else:
                self._refused_for = ""
