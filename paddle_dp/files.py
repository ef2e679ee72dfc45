"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The name of a half-written file: its writer's pid and machine, and a random number.
PARTIAL = re.compile(r"\..+\.partial-([0-9]{1,9})-([0-9a-f]{4})[0-9a-f]{4}")
FORSAKEN = 3600.0  # seconds without a write after which a writer on another machine counts as killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path next to `path` for a file or folder that replaces it at the block's end, or goes if that fails."""
    partial = path.parent / f".{path.name}.partial-{os.getpid()}-{_machine()}{os.urandom(2).hex()}"
    try:
        yield partial
        partial.replace(path)
    finally:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Removes the half-written files in a folder that processes left when they were killed; a living process, such as
    another command's, keeps its files."""
    for path in folder.glob(".*.partial-*"):
        name = PARTIAL.fullmatch(path.name)
        with suppress(FileNotFoundError):  # finished meanwhile
            if name and path.is_file() and not _may_live(int(name[1]), name[2], path):
                path.unlink()


def _may_live(pid: int, machine: str, path: Path) -> bool:
    if machine != _machine():
        return time.time() - path.stat().st_mtime < FORSAKEN
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # another user's
    return True


def _machine() -> str:
    """Returns four digits that differ between machines, and between containers, as each counts its own pids."""
    name = socket.gethostname()
    with suppress(OSError):  # not Linux
        name += os.readlink("/proc/self/ns/pid")
    return f"{zlib.crc32(name.encode()) & 0xFFFF:04x}"
