"""Whether a run's folder is still there: somebody may delete or rename it while the training runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paddle_dp.errors import LostFolderError

EVERY = 2.0  # seconds between two looks


class RunFolder:
    """Compares what is at `path` with the folder that was there when the run began."""

    def __init__(self, path: Path):
        self.path, self._folder = path, -1
        self.begin()

    def begin(self) -> None:
        """The folder that is there now is the run's: an older run has been moved out of its way."""
        self.__del__()
        self._folder, self._looked, self._is_lost = -1, -EVERY, False
        self.is_lost(now=True)

    def is_lost(self, now: bool = False) -> bool:
        """Whether another folder, or none, is at the path; looked up every two seconds, or `now`."""
        if self._is_lost or (not now and time.monotonic() < self._looked + EVERY):
            return self._is_lost
        self._looked = time.monotonic()
        try:
            if self._folder < 0:  # that of a script is made by who writes first
                self._folder = os.open(
                    self.path, os.O_RDONLY | os.O_DIRECTORY
                )  # open, its number goes to no other
            self._is_lost = not os.path.samestat(os.fstat(self._folder), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            self._is_lost = self._folder >= 0
        except OSError:  # a network disk that does not answer for a moment
            pass
        return self._is_lost

    def __del__(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def lost(path: Path, step: int) -> LostFolderError:
    """What to say where a run's folder is lost after update `step`."""
    return LostFolderError(
        f"{path} was deleted, renamed or replaced while the training ran: its recipe, metrics, logs and earlier "
        f"checkpoints are no longer there. The training ends after step {step}; a recipe with `checkpoint` has saved "
        "that step in a new folder of this name. If the old one has another name now, move that checkpoint into it."
    )
