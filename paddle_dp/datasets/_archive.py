"""Unpacks a .tar.gz or .tar into memory, up to a size limit."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

from paddle_dp.errors import DataError


class _Bounded:
    """A stream that raises ValueError after `largest` unpacked bytes."""

    def __init__(self, stream: IO[bytes], largest: int):
        self._stream, self._left, self._largest = stream, largest, largest

    def read(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._largest >> 20} MB")
        return data


def unpacked(path: Path, largest: int) -> dict[str, bytes]:
    """The files of an archive by their names without folders. Raises DataError, with the archive's name, if it cannot
    be read or unpacks to more than `largest` bytes."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            with tarfile.open(fileobj=_Bounded(stream, largest), mode="r|") as archive:  # type: ignore[call-overload]
                return _files(archive, largest)
    except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an archive (.tar.gz or .tar): {error}") from error


def _files(archive: tarfile.TarFile, largest: int) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for member in archive:
        largest -= member.size  # counts a sparse file's holes, too
        if largest < 0:
            raise ValueError(f"{member.name} is too large for this data set")
        if member.isfile() and (stream := archive.extractfile(member)) is not None:
            contents[Path(member.name).name] = stream.read()
    return contents
