"""Files of a run, which a full disk does not spoil or end: small ones, each replaced as a whole, and logs."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections import deque
from pathlib import Path

from paddle_dp.checkpoint.disk import replace


class Files:
    """Writes files. Files that a disk refuses stay in memory and are tried again with the next one."""

    def __init__(self) -> None:
        self._pending: dict[Path, bytes] = {}
        self._reported: set[Path] = set()

    def write(self, path: Path, content: bytes) -> None:
        """Replaces the file, and makes its folder. Prints one line to stderr if it could not be written."""
        self._pending[path] = content
        for target in list(self._pending):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                replace(target, self._pending[target])
                del self._pending[target]
            except OSError as error:
                if target not in self._reported:
                    print(
                        f"{target} was not written: {error.strerror}. The training goes on, and tries again.",
                        file=sys.stderr,
                        flush=True,
                    )
                self._reported.add(target)


# Logs -----------------------------------------------------------------------------------------------------------------
# A log file grows by whole entries.

_CLOSED = -1  # no file descriptor
_MAX_BYTES_WAITING = 64 * 2**20  # bytes of entries that wait in memory


class Journal:
    """Appends each entry whole or not at all, unbuffered: a kill -9 loses nothing.

    A full disk does not end the training: one line on stderr reports it, and the last 64 MiB of entries wait in memory
    until they can be written. Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path):
        self.path, self.lost = path, 0
        self._waiting: deque[bytes] = deque()
        self._size_waiting, self._reported = 0, False
        self._file = _CLOSED
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o666)
        self._size = os.fstat(self._file).st_size

    def add(self, entry: bytes) -> None:
        """Appends `entry`, after the entries that are still waiting."""
        self._waiting.append(entry)
        self._size_waiting += len(entry)
        self._write()
        while self._size_waiting > _MAX_BYTES_WAITING:
            self._size_waiting -= len(self._waiting.popleft())
            self.lost += 1

    def _write(self) -> None:
        try:
            while self._waiting:
                entry = self._waiting[0]
                if os.write(self._file, entry) != len(entry):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._waiting.popleft()
                self._size += len(entry)
                self._size_waiting -= len(entry)
            self._reported = False
        except OSError as error:
            # Half an entry would make all later entries unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            if not self._reported:
                self._warn(
                    f"cannot be written: {error.strerror}. Its entries wait in memory until it can be."
                )
            self._reported = True

    def _warn(self, message: str) -> None:
        print(f"{self.path} {message}", file=sys.stderr, flush=True)

    def __del__(self) -> None:
        # Nothing is buffered, so there is no close() to forget; waiting entries are tried once more.
        if self._file == _CLOSED:
            return
        if self._waiting:
            self._write()
        if self._waiting or self.lost:
            self._warn(f"lacks {len(self._waiting) + self.lost} entries: it could not be written to the end.")
        os.close(self._file)
