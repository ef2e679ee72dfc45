"""Makes a temporary folder for a command: it is removed at the command's end or, after a kill, by the next command."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paddle_dp.errors import EndedError
from paddle_dp.launch.processes import handled_signals

LOCK = ".lock"  # locked while its folder is in use; the kernel releases the lock when the process ends


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yields a new folder in `parent`, by default the system's folder for temporary files (TMPDIR), after removing
    abandoned ones.

    Within the context SIGTERM and SIGHUP raise EndedError, so that this folder is removed, too.
    """
    remove_abandoned(prefix, parent)
    with (
        handled_signals((signal.SIGTERM, signal.SIGHUP), raise_ended),
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name,
        (Path(name) / f"{LOCK}.new").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, Path(name) / LOCK)  # not before: a folder that can be locked is abandoned
        yield Path(name)


def remove_abandoned(prefix: str, parent: Path | None = None) -> None:
    """Removes the folders of commands with this prefix that were killed."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        try:
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, another user's, or not one of these folders


def raise_ended(number: int, frame: FrameType | None) -> None:
    raise EndedError(number)
