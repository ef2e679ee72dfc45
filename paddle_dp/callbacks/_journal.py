"""A log file that grows by whole entries, and that never ends a training."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

_CLOSED = -1  # no file descriptor


class Journal:
    """Appends each entry whole or not at all, unbuffered: a kill -9 loses nothing.

    A full disk does not end the training: the entry is left out, one line on stderr says so, and later entries are
    tried again.
    """

    def __init__(self, path: Path):
        self.path, self.lost = path, 0
        self._file = _CLOSED
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size

    def add(self, entry: bytes) -> None:
        """Appends `entry`."""
        try:
            if os.write(self._file, entry) != len(entry):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(entry)
        except OSError as error:
            # Half an entry would make every later one unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            if not self.lost:
                print(f"{self.path} is missing entries from here on: {error.strerror}.", file=sys.stderr)
            self.lost += 1

    def __del__(self) -> None:
        # Nothing is buffered, so there is no close() that a caller must not forget.
        if self._file != _CLOSED:
            os.close(self._file)
