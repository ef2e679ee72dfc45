"""Tokens on disk: made once from their texts, then mapped into the memory of every process that reads them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Array

VERSION = 1  # of what is in the files


def folder(given: str | None) -> Path:
    """`given`, or the user's folder for things that can be made again."""
    if given:
        return Path(given).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "paddle_dp"


def key(*what: object) -> str:
    """A name for the tokens that come from all this."""
    return hashlib.sha256(json.dumps([VERSION, *what]).encode()).hexdigest()[:24]


def tokens(where: Path, name: str, make: Callable[[], Array]) -> Array:
    """The tokens called `name`, mapped from the folder `where`; made and written first where they are not there.

    Several processes may ask at once: one makes them while the others wait, and where locks do not work (some
    network folders) each makes its own, and the last rename wins. A folder that cannot be written is done without.
    """
    file = where / f"{name}.npy"
    if (known := _read(file)) is not None:
        return known
    with contextlib.ExitStack() as lock:
        try:
            where.mkdir(parents=True, exist_ok=True)
            lock.enter_context(_alone(where / f".{name}.lock"))
        except OSError:
            return make()
        known = _read(file)  # another process may have made them while this one waited
        return _write(file, make()) if known is None else known


def _read(file: Path) -> Array | None:
    try:
        read: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (
        OSError,
        ValueError,
        EOFError,
    ):  # not there, or not whole: some disks lose the end of a renamed file
        return None
    return read


def _write(file: Path, made: Array) -> Array:
    """`made`, mapped from `file`; from memory when the disk does not take it."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.stem}.", delete=False) as out:
            temporary = out.name
            np.save(out, made)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except OSError:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        return made
    read = _read(file)
    return made if read is None else read


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process holds `lock`, where the file system knows locks."""
    with lock.open("w") as held:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
