"""Writes small files of a run, each replaced as a whole; a full disk does not end the training."""

from __future__ import annotations

import sys
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
