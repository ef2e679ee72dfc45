"""Saves a checkpoint in the background: a thread per rank writes its shards, and rank 0's thread publishes the folder.

The threads use no process group, where they would interleave with training's collectives. Each rank's thread leaves a
report with its files' checksums, which rank 0's thread polls for. So a complete checkpoint appears even if training has
failed meanwhile. All ranks call `poll` and `wait`, which raise failures, in their main threads.
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

_LONGEST_PAUSE = 0.5  # seconds between two polls for the other ranks' reports


class _AbandonedError(Exception):
    """Rank 0 stops waiting for a rank that has failed."""


def _nothing(path: Path) -> None:
    """The default `placed` callback: does nothing."""


class BackgroundSave:
    """A checkpoint that is being written as `folder`/step-…, with the same bytes as `save` writes.

    Collective. Until it is done, the snapshot's arrays must not change and nothing else may be saved in `folder`.
    Rank 0's thread finally calls `placed` with the path. Raises as `save` does if the folder cannot be made.
    """

    def __init__(
        self, snapshot: Snapshot, folder: Path, mesh: Mesh, placed: Callable[[Path], object] = _nothing
    ):
        self.step, self.mesh, self._placed = snapshot.step, mesh, placed
        self.path = Path(folder) / step_name(snapshot.step)
        self.seconds = 0.0
        """Seconds this rank's thread took; on rank 0, until the checkpoint was in place."""
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
        """Waits for another rank's report and returns it."""
        pause = 0.01
        while True:
            try:
                report: dict[str, list[int]] = json_codec.decode(_report(self._partial, rank).read_bytes())
                return report
            except FileNotFoundError:
                if self._abandoned.wait(pause):
                    raise _AbandonedError from None
                pause = min(2 * pause, _LONGEST_PAUSE)

    def poll(self) -> bool:
        """True if the checkpoint is saved. Collective: one small gather.

        After all threads have ended, raises the same error on every rank: NotWrittenError if a disk did not take the
        checkpoint, CheckpointError for any other failure. The partial folder is then removed.
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
        """Waits until the checkpoint is saved. Collective. Raises the errors of `poll`."""
        if self.poll():
            return
        # Rank 0's thread may wait for a rank that has failed; the poll after this barrier tells it to stop.
        self._written.wait()
        self.mesh.wait("checkpoint written")
        if self.poll():
            return
        self._thread.join()
        self.mesh.wait("checkpoint in place")
        self.poll()

    def finish_alone(self, rank_seconds: float = 60.0, peer_seconds: float = 3.0) -> bool:
        """Waits up to `rank_seconds` for this rank's files and, on rank 0, up to `peer_seconds` for the other ranks'.

        Not collective: called after training has failed, when other ranks may be gone. Returns True if this rank's
        files are written; on rank 0, if the checkpoint is in place.
        """
        self._written.wait(rank_seconds)
        self._thread.join(peer_seconds if self.mesh.is_main and self.mesh.ranks > 1 else rank_seconds)
        self._abandoned.set()
        return self._done


def _report(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.written"
