"""Token files on disk: made once from texts, then memory-mapped by every reading process."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.files import replacing

VERSION = 1  # of the files' format


def folder(path: str | None) -> Path:
    """`path`, or the user's cache folder."""
    if path:
        return Path(path).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "paddle_dp"


def key(*sources: object) -> str:
    """The file name of the tokens that are made from `sources` (JSON values)."""
    return hashlib.sha256(json.dumps([VERSION, *sources]).encode()).hexdigest()[:24]


def tokens(cache: Path, name: str, make: Callable[[], Array]) -> Array:
    """The tokens `name`, memory-mapped from the folder `cache`; if they are missing, they are made and written first.

    Several processes may call this: one makes the tokens while the others wait. Without file locks (some network
    folders), every process makes them. If the folder cannot be written, they stay in memory.
    """
    file = cache / f"{name}.npy"
    if (known := _read(file)) is not None:
        return known
    with contextlib.ExitStack() as lock:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock.enter_context(_alone(cache / f".{name}.lock"))
        except OSError:
            return make()
        known = _read(file)  # another process may have made it while this one waited
        return _write(file, make()) if known is None else known


def _read(file: Path) -> Array | None:
    try:
        read: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    # The file is missing or cut short: some disks lose the end of a renamed file.
    except (OSError, ValueError, EOFError):
        return None
    return read


def _write(file: Path, array: Array) -> Array:
    """Writes `array` to `file` and maps it; returns `array` itself if the disk refuses."""
    try:
        with replacing(file) as partial, partial.open("wb") as out:
            np.save(out, array)
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        return array
    read = _read(file)
    return array if read is None else read


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds the file lock `lock`; has no effect on a file system without locks."""
    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
