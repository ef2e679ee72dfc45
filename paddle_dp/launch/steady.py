"""A standard output that never ends a training: output that a full disk or a closed pipe refuses is kept, or dropped.

Under Paddle's launcher a rank's screen is a file in the run folder, so print() would raise on a full disk.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

MAX_PENDING_BYTES = 2**20  # bytes, the last ones


class SteadyFile(io.RawIOBase):
    """Writes to a descriptor. Keeps the last MiB of output that it cannot write; drops output without a reader.

    `pending` has the bytes not yet written, shared by all writers of a file so that lines do not interleave.
    """

    def __init__(self, descriptor: int, pending: bytearray):
        self._descriptor, self._pending = descriptor, pending

    def write(self, content: bytes | memoryview) -> int:  # type: ignore[override]
        left = bytes(self._pending) + bytes(content)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            left = b"" if error.errno in (errno.EPIPE, errno.EIO, errno.EBADF) else left[-MAX_PENDING_BYTES:]
        self._pending[:] = left
        return len(content)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def open_standard_files() -> None:
    """Opens /dev/null in place of each standard file that this process was started without (`>&-`, cron, a daemon).

    Otherwise the next opened file would get its descriptor: C++ code would print into a checkpoint. Call it before any
    other file is opened.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this stream's
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))


@contextmanager
def steady_screen() -> Iterator[None]:
    """Within the context, printing to standard output and error raises no OSError."""
    before = sys.stdout, sys.stderr
    pending = bytearray()
    other = pending if _same_file(1, 2) else bytearray()
    sys.stdout, sys.stderr = now = _steady(sys.stdout, 1, pending), _steady(sys.stderr, 2, other)
    try:
        yield
    finally:
        for stream in now:
            stream.flush()
            buffer: Any = getattr(stream, "buffer", None)
            raw = getattr(buffer, "raw", buffer)
            if isinstance(raw, SteadyFile):
                raw.write(b"")  # writes pending bytes
        sys.stdout, sys.stderr = before


def _same_file(first: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(first, other)
    except OSError:
        return False


def _steady(stream: TextIO, descriptor: int, pending: bytearray) -> TextIO:
    """Returns the stream over a SteadyFile; a stream that is no standard file, such as a test's, unchanged."""
    if type(stream) is not io.TextIOWrapper or not _writes_to(stream, descriptor):
        return stream
    with suppress(OSError):
        stream.flush()
    raw: Any = SteadyFile(descriptor, pending)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # `python -u` writes through
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _writes_to(stream: io.TextIOWrapper, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):
        return False
