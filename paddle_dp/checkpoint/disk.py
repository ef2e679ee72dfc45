"""Writes files that are flushed to the disk when a call returns, with the checksum of the intended bytes."""

from __future__ import annotations

import errno
import io
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.files import replacing

_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Digest:
    """The size of a file and the CRC-32 of its bytes.

    CRC-32 finds damage by disks and copies (it is not a signature) and costs half as much as SHA-256:
    python -m timeit -s "import zlib; b = bytes(500_000_000)" "zlib.crc32(b)"
    """

    size: int
    crc32: int


def write(path: Path, buffers: Iterable[bytes | memoryview]) -> Digest:
    """Writes a new file and flushes it to the disk. Returns the digest of `buffers`; the file is not read back."""
    size = crc = 0
    with open(path, "xb", buffering=0) as file:
        for chunk in _chunks(buffers):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
            del chunk  # the last chunk would keep a large buffer in memory
        os.fsync(file.fileno())
    return Digest(size, crc)


def _chunks(buffers: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        view = memoryview(buffer)
        del buffer
        yield from (view[i : i + _CHUNK] for i in range(0, len(view), _CHUNK))
        del view


def open_regular(path: Path) -> io.FileIO:
    """Opens a file for reading, unbuffered.

    Raises OSError for a link, which may lead out of the folder, and for a pipe or a device, which may be endless.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return io.FileIO(descriptor)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file. Raises OSError as `open_regular` does, and if the file has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} at most are expected", str(path))
        return file.read(size)


def digest_of(path: Path, size: int | None = None) -> Digest:
    """Reads a file and returns its size and checksum. If it has not the expected `size`, it is not read: checksum 0.

    Raises OSError as `open_regular` does.
    """
    length = crc = 0
    with open_regular(path) as file:
        there = os.fstat(file.fileno()).st_size
        if size is not None and there != size:
            return Digest(there, 0)
        buffer = bytearray(_CHUNK)
        while count := file.readinto(buffer):
            crc, length = zlib.crc32(memoryview(buffer)[:count], crc), length + count
    return Digest(length, crc)


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


def replace(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replaces a file atomically: a reader sees either the old or the new content."""
    with replacing(path) as partial:
        write(partial, [content] if isinstance(content, bytes) else content)
    flush_folder(path.parent)
