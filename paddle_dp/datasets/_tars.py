"""An index of the samples in tar files, made once, and their bytes at any position, without unpacking.

The layout is webdataset's: files with one name up to the first dot of their last component belong to one sample,
`a/0001.jpg`, `a/0001.cls`; the rest of the name is the kind of each.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._labels import MOST_CLASSES
from paddle_dp.datasets._paths import file_state, states_of
from paddle_dp.datasets._windows import cached
from paddle_dp.errors import DataError
from paddle_dp.text import and_more

IMAGES = ("jpg", "jpeg", "png", "bmp", "webp", "ppm", "pgm", "tif", "tiff", "gif")
_VERSION = 1  # of the index
_MOST_OPEN = 64  # shards that a process keeps open
_MOST_LABEL = 1 << 20  # bytes of a member with a label
_BLOCK = tarfile.BLOCKSIZE


def shard_index(shards: Sequence[Path], image: str | None, label: str, cache: str | None) -> Array:
    """The samples of the shards in their order: a structured array of `shard`, `offset` and `size` of the image,
    `label` and `name` of the image's member.

    It is kept in the folder `cache`, under a name of the shards' paths, sizes and times of change. Raises DataError for
    a damaged archive, a member that is no plain file, a name that occurs twice, and a sample without one image and one
    label.
    """
    sources = ("tar", _VERSION, states_of(shards), image, label)
    return cached(cache, sources, lambda: (_indexed(shards, image, label),))[0]


def _indexed(shards: Sequence[Path], image: str | None, label: str) -> Array:
    rows = [(number, *row) for number, shard in enumerate(shards) for row in _samples(shard, image, label)]
    if not rows:
        raise DataError(f"{shards[0]}{and_more(shards)} hold no sample")
    width = max(len(row[-1]) for row in rows)
    fields = [("shard", "<u4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i8"), ("name", f"S{width}")]
    return np.array(rows, np.dtype(fields))


def _samples(shard: Path, image: str | None, label: str) -> Iterator[tuple[int, int, int, bytes]]:
    """Yields offset and size of the image, label, and name of the image's member, of each sample of a shard."""
    suffix, _, field = label.partition(".")
    images = IMAGES if image is None else (image,)
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    with shard.open("rb") as file:
        for member in _members(shard, file):
            key, kind = _split(member.name)
            if kind in samples.setdefault(key, {}):
                raise DataError(f"{shard}: the member {member.name} occurs twice")
            samples[key][kind] = member
        for key, members in samples.items():
            chosen = [kind for kind in images if kind in members]
            if len(chosen) != 1 or suffix not in members:
                lacks = _lacking(chosen, images, f"{key}.{suffix}")
                raise DataError(
                    f"{shard}: the sample {key} has no {lacks}; it has {', '.join(sorted(members))}"
                )
            picture, target = members[chosen[0]], members[suffix]
            name = picture.name.encode("utf-8", "surrogateescape")
            yield picture.offset_data, picture.size, _label(shard, file, target, field), name


def _lacking(chosen: Sequence[str], images: Sequence[str], label: str) -> str:
    if len(chosen) == 1:
        return f"label, {label} (dataset.label)"
    if chosen:
        return f"single image but {' and '.join(chosen)}: name the one to read, dataset.image={chosen[0]}"
    return f"image ({', '.join(images)})"


def _split(name: str) -> tuple[str, str]:
    """ "a.b/0001.seg.png" → ("a.b/0001", "seg.png"), the suffix in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


def _members(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yields the plain files of an archive; hidden files are left out. Raises DataError for anything that the archive
    cannot mean by itself: links, devices, sparse files, paths out of the archive, a missing end."""
    size, last = os.fstat(file.fileno()).st_size, "its beginning"
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise DataError(f"{shard}: the member {member.name} leads out of the archive")
                if member.issparse() or not (member.isreg() or member.isdir()):
                    raise DataError(f"{shard}: the member {member.name} is a link or another special file")
                if member.offset_data + member.size > size:
                    raise DataError(f"{shard} is cut off in its member {member.name}, or still being written")
                last = f"its member {member.name}"
                if member.isreg() and not path.name.startswith((".", "__")):
                    yield member
            end = archive.offset
    except DataError:
        raise
    except Exception as error:  # tarfile may raise anything for a damaged header
        raise DataError(
            f"{shard} cannot be read as a tar file after {last}: {type(error).__name__}: {error}{_packed(shard)}"
        ) from error
    _check_end(shard, file, end, last)


def _check_end(shard: Path, file: BinaryIO, end: int, last: str) -> None:
    """Raises DataError unless the archive ends at byte `end` with a block of zeros, and nothing follows: tarfile takes
    any damaged header for the end, and the first of joined archives for all of them."""
    first = os.pread(file.fileno(), _BLOCK, end)
    if len(first) < _BLOCK or first.strip(b"\0"):
        state = "is damaged" if len(first) == _BLOCK else "is cut off, or still being written,"
        raise DataError(f"{shard} {state} after {last}: at byte {end:,} an archive's end is missing")
    file.seek(end)
    while chunk := file.read(1 << 20):
        if chunk.strip(b"\0"):
            raise DataError(
                f"{shard} has more after the end of its archive, at byte {end:,}, as archives that were joined have: "
                "give each a file, or join them by tar --concatenate"
            )


def _packed(shard: Path) -> str:
    with shard.open("rb") as file:
        return "; unpack it: gunzip -k" if file.read(2) == b"\x1f\x8b" else ""


def _label(shard: Path, file: BinaryIO, member: tarfile.TarInfo, field: str) -> int:
    """The class number in a member: its text, or the `field` of its JSON object. Raises DataError for anything else."""
    data = os.pread(file.fileno(), min(member.size, _MOST_LABEL), member.offset_data)
    try:
        value: Any = json.loads(data) if field else data.decode().strip()
        for name in filter(None, field.split(".")):
            value = value[name]
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < MOST_CLASSES:
            raise ValueError(f"{str(value)[:40]!r}")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        meant = f"an object with a class number as its '{field}'" if field else "the number of a class"
        raise DataError(
            f"{shard}: the member {member.name} is not {meant}: {type(error).__name__}: {error}"
        ) from None
    return number


class TarShards:
    """The bytes of members, read at their positions. Each process opens the shards that it reads; processes that were
    forked may share a file, as no read depends on a position in it."""

    def __init__(self, shards: Sequence[Path]):
        self.files = [*shards]
        self._states = [file_state(os.stat(shard)) for shard in shards]
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Raises DataError if the file is another one than the indexed one, or is gone."""
        data = os.pread(self._descriptor(shard), size, offset)
        if len(data) < size:
            raise DataError(f"{self.files[shard]} was cut off after its index was made")
        return data

    def _descriptor(self, shard: int) -> int:
        if (descriptor := self._open.get(shard)) is not None:
            self._open.move_to_end(shard)
            return descriptor
        try:
            descriptor = os.open(self.files[shard], os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.files[shard]} cannot be read: {error.strerror}") from error
        if file_state(os.fstat(descriptor)) != self._states[shard]:
            os.close(descriptor)
            raise DataError(
                f"{self.files[shard]} has changed after its index was made: start the training again"
            )
        self._open[shard] = descriptor
        if len(self._open) > _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def __del__(self) -> None:
        for descriptor in vars(self).get("_open", {}).values():
            os.close(descriptor)
