"""A folder for what a command writes while it works: gone when it ends, and after a kill, when the next one begins."""

from __future__ import annotations

import fcntl
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paddle_dp.errors import EndedError

HELD = ".held"  # locked while its folder is in use; the kernel lets go, however a process ends


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder in the folder for temporary files (TMPDIR), for the time of a `with`.

    Folders with this prefix whose processes are gone are removed first. Inside, SIGTERM and SIGHUP raise EndedError, so
    that this folder is removed, too.
    """
    sweep(prefix)
    with _ending(), tempfile.TemporaryDirectory(prefix=prefix) as name, (Path(name) / HELD).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield Path(name)


def sweep(prefix: str) -> None:
    """Removes what commands with this prefix have left behind that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            with (folder / HELD).open("r+") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, somebody else's, or none of these folders


@contextmanager
def _ending() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise EndedError(number)

    main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no signals
    asked = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
