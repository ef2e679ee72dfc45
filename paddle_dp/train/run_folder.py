"""Detects that a run's folder was deleted, renamed or emptied during the run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paddle_dp.errors import LostFolderError

EVERY = 2.0  # seconds between two checks
FILES = frozenset({"recipe.yaml", "metrics.jsonl"})  # a run makes each once, and needs it to its end


class RunFolder:
    """Compares the folder at `path` with the run's original folder, and with the files seen there."""

    def __init__(self, path: Path):
        self.path, self._folder = path, -1
        self._known_files: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """Takes the present folder as the run's: an older run has been moved out of its way."""
        self._close()
        self._folder, self._looked, self._is_lost, self._known_files = -1, -EVERY, False, set()
        self.is_lost(now=True)

    def is_lost(self, now: bool = False) -> bool:
        """True if another folder, or none, is at the path, or a file of the run or all files (`rm -r RUN/*` leaves the
        lock) have disappeared. Checked every two seconds, or `now`."""
        if self._is_lost or (not now and time.monotonic() < self._looked + EVERY):
            return self._is_lost
        self._looked = time.monotonic()
        try:
            if self._folder < 0:  # a script's folder is made by its first writer
                self._folder = os.open(
                    self.path, os.O_RDONLY | os.O_DIRECTORY
                )  # while it is open, its inode is not reused
            there = {name for name in os.listdir(self.path) if not name.startswith(".")}
            is_other = not os.path.samestat(os.fstat(self._folder), os.stat(self.path))
            is_emptied = bool(self._known_files) and not there
            self._is_lost = is_other or is_emptied or bool(FILES & self._known_files - there)
            self._known_files |= there
        except (FileNotFoundError, NotADirectoryError):
            self._is_lost = self._folder >= 0
        except OSError:  # a network disk that does not answer for a moment
            pass
        return self._is_lost

    def _close(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)

    __del__ = _close


def lost(path: Path, step: int) -> LostFolderError:
    """The error for a run's folder that is lost after update `step`."""
    return LostFolderError(
        f"{path} was deleted, renamed, replaced or emptied while the training ran: its recipe, metrics, logs or "
        f"earlier checkpoints are no longer there. The training ends after step {step}; a recipe with `checkpoint` has "
        "saved that step in the folder that has this name now. If the old one has another name, move that checkpoint "
        "into it."
    )
