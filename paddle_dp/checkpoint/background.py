"""Saves a checkpoint in the background: a thread of each rank writes its shards, and rank 0's puts them into place.

The threads exchange nothing over process groups, where they would get between training's own exchanges. A rank that has
written its files leaves a small one with their checksums, for which rank 0's thread looks: so a checkpoint appears as
soon as it is whole, also when training has failed meanwhile. Whether it did is asked for by `poll` and `wait`, which
all ranks call in their main threads.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import replace
from paddle_dp.checkpoint.manifest import step_name
from paddle_dp.checkpoint.saving import Snapshot, begin, failure_of, finish, raise_first, write_rank

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh

_LONGEST_PAUSE = 0.5  # seconds between two looks for the other ranks' files


class _AbandonedError(Exception):
    """Rank 0 does not wait any longer for a rank: that one's failure is the cause."""


def _nothing(path: Path) -> None:
    """What is done after a checkpoint is in place, by default."""


class BackgroundSave:
    """A checkpoint that is being written as `folder`/step-…, with the bytes that `save` would write.

    Made by all ranks together. The snapshot's arrays must not change before it is done, and nothing else may be saved
    there. `placed` is called with its path, in rank 0's thread, when it is in place. Raises what `save` raises if its
    folder cannot be made.
    """

    def __init__(
        self, snapshot: Snapshot, folder: Path, mesh: Mesh, placed: Callable[[Path], object] = _nothing
    ):
        self.step, self.mesh, self._placed = snapshot.step, mesh, placed
        self.path = Path(folder) / step_name(snapshot.step)
        self.seconds = 0.0
        """From the beginning to the end on this rank; of rank 0, until the checkpoint was in place."""
        self._partial = begin(self.path, mesh, slow=False)
        self._failure: list[str] | None = None
        self._done = False
        self._written = threading.Event()  # this rank's own files, or it has failed
        self._abandoned = threading.Event()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def _work(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
            self._done = True
        except _AbandonedError:
            pass
        except Exception as error:  # noqa: BLE001 - poll() raises it on every rank
            self._failure = failure_of(error, self.path, self.mesh)
        finally:
            self.seconds = time.perf_counter() - self._began
            self._written.set()

    def _write(self, snapshot: Snapshot) -> None:
        report = write_rank(snapshot, self._partial, self.mesh.rank)
        if not self.mesh.is_main:
            replace(_report(self._partial, self.mesh.rank), json_codec.encode(report))
            return
        self._written.set()
        reports = [report, *(self._report_of(rank) for rank in range(1, self.mesh.ranks))]
        for rank in range(1, self.mesh.ranks):
            _report(self._partial, rank).unlink()
        finish(snapshot, self._partial, self.path, reports)
        self._placed(self.path)

    def _report_of(self, rank: int) -> dict[str, list[int]]:
        """What another rank has written, as soon as it has."""
        pause = 0.01
        while True:
            try:
                found: dict[str, list[int]] = json_codec.decode(_report(self._partial, rank).read_bytes())
                return found
            except FileNotFoundError:
                if self._abandoned.wait(pause):
                    raise _AbandonedError from None
                pause = min(2 * pause, _LONGEST_PAUSE)

    def poll(self) -> bool:
        """Whether it is saved. Collective, at the cost of one small exchange.

        Raises, the same on every rank and after all threads have ended, NotWrittenError if a disk did not take it, and
        CheckpointError for any other failure. Nothing is left of it then.
        """
        rows: list[Any] = self.mesh.gather([not self._thread.is_alive(), self._failure])
        failures = [failure for _, failure in rows]
        if any(failures):
            self._abandoned.set()
        if not all(ended for ended, _ in rows):
            return False
        if any(failures) and self.mesh.is_main:
            shutil.rmtree(self._partial, ignore_errors=True)
        raise_first(failures)
        return True

    def wait(self) -> None:
        """Returns when it is saved. Collective. Raises what `poll` raises."""
        if self.poll():
            return
        # Rank 0's thread may be waiting for a rank that has failed: that is known after all have written, or failed.
        self._written.wait()
        self.mesh.wait("checkpoint written")
        if self.poll():
            return
        self._thread.join()
        self.mesh.wait("checkpoint in place")
        self.poll()

    def finish_alone(self, rank_seconds: float = 60.0, peer_seconds: float = 3.0) -> bool:
        """Waits for this rank's part, and on rank 0 for the others', for so many seconds. Not collective: for the time
        after a failure of the training, when others may be gone. Returns whether this rank has done its part; rank 0,
        whether the checkpoint is in place."""
        self._written.wait(rank_seconds)
        self._thread.join(peer_seconds if self.mesh.is_main and self.mesh.ranks > 1 else rank_seconds)
        self._abandoned.set()
        return self._done


def _report(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.written"
