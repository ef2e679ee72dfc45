"""Writes files that are flushed to the disk when a call returns, with the checksum of what was to be written."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Digest:
    """The size of a file and the CRC-32 of its bytes.

    CRC-32 finds damage by disks and copies (it is no signature), and costs half of SHA-256:
    python -m timeit -s "import zlib; b = bytes(500_000_000)" "zlib.crc32(b)"
    """

    size: int
    crc32: int


def write(path: Path, parts: Iterable[bytes | memoryview]) -> Digest:
    """Writes a new file and flushes it to the disk. The digest is that of `parts`, not of what the disk returns."""
    size = crc = 0
    with open(path, "xb", buffering=0) as file:
        for chunk in _chunks(parts):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
        os.fsync(file.fileno())
    return Digest(size, crc)


def _chunks(parts: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        view = memoryview(part)
        yield from (view[i : i + _CHUNK] for i in range(0, len(view), _CHUNK))


def digest_of(path: Path) -> Digest:
    """The size and checksum of a file, by reading it. Raises OSError for a link: it may lead out of the folder."""
    size = crc = 0
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            crc, size = zlib.crc32(buffer[:count], crc), size + count
    return Digest(size, crc)


def flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk, if the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Replaces a small file atomically: a reader sees either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        write(partial, [content])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush_folder(path.parent)
