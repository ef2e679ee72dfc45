"""Whether a run's folder and its files are still there: somebody may delete, rename or empty it in mid-run."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paddle_dp.errors import LostFolderError

EVERY = 2.0  # seconds between two looks
FILES = frozenset({"recipe.yaml", "metrics.jsonl"})  # a run makes each once, and needs it to its end


class RunFolder:
    """Compares what is at `path` with the folder that was there when the run began, and with what was seen in it."""

    def __init__(self, path: Path):
        self.path, self._folder = path, -1
        self._known_files: set[str] = set()
        self.begin()

    def begin(self) -> None:
        """The folder that is there now is the run's: an older run has been moved out of its way."""
        self.__del__()
        self._folder, self._looked, self._is_lost, self._known_files = -1, -EVERY, False, set()
        self.is_lost(now=True)

    def is_lost(self, now: bool = False) -> bool:
        """Whether another folder, or none, is at the path, or one without what was seen in it: a file of the run, or
        everything (`rm -r RUN/*` leaves the lock). Looked up every two seconds, or `now`."""
        if self._is_lost or (not now and time.monotonic() < self._looked + EVERY):
            return self._is_lost
        self._looked = time.monotonic()
        try:
            if self._folder < 0:  # that of a script is made by who writes first
                self._folder = os.open(
                    self.path, os.O_RDONLY | os.O_DIRECTORY
                )  # open, its number goes to no other
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

    def __del__(self) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def lost(path: Path, step: int) -> LostFolderError:
    """What to say where a run's folder is lost after update `step`."""
    return LostFolderError(
        f"{path} was deleted, renamed, replaced or emptied while the training ran: its recipe, metrics, logs or "
        f"earlier checkpoints are no longer there. The training ends after step {step}; a recipe with `checkpoint` has "
        "saved that step in the folder that has this name now. If the old one has another name, move that checkpoint "
        "into it."
    )
