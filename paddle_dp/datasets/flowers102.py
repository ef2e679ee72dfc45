"""Oxford's 102 flowers (Nilsback and Zisserman 2008) from a folder: 1020 images to train on, 6149 to test on."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._paths import existing_path, inside
from paddle_dp.errors import DataError

# Reads lists of numbers from MATLAB's .mat files (level 5, as MATLAB and SciPy write), up to a size limit -------------


LARGEST = 16 << 20  # bytes of a file, and of its unpacked content
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = range(6, 16)  # array classes: double, single, and integers of 8 to 64 bits
_COMPLEX = 0x0800


def read_integers(path: Path, name: str) -> Array:
    """The array `name` in a .mat file, as int64 [n]. Raises DataError, with the file's path, if there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MB, and lists of numbers are not")
        numbers = _find(content, name)
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not (np.abs(numbers.astype(np.float64)) < 2**53).all() or (numbers != np.rint(numbers)).any():
        raise DataError(f"{path}: {name} holds other than whole numbers")
    return numbers.astype(np.int64)


@dataclass(frozen=True)
class _Element:
    """A data element: its type, its bytes, and its byte order ("<" or ">")."""

    kind: int
    data: bytes
    order: str

    def numbers(self) -> Array:
        if self.kind not in _NUMBERS:
            raise ValueError(f"type {self.kind} is none of numbers")
        dtype = np.dtype(self.order + _NUMBERS[self.kind])
        return np.frombuffer(self.data, dtype, count=len(self.data) // dtype.itemsize)


def _find(content: bytes, name: str) -> Array:
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None:
        raise ValueError("it is no MATLAB file of level 5 (save it with -v6 or -v7)")
    known = []
    for matrix in _matrices(content[128:], order):
        flags, _, label, *values = _elements(matrix, order)
        known.append(label.data.decode("latin-1"))
        if known[-1] != name:
            continue
        kind = int(flags.numbers()[0])
        if kind & 0xFF not in _CLASSES or kind & _COMPLEX or not values:
            raise ValueError(f"{name} is not an array of real numbers")
        return values[0].numbers()
    raise ValueError(f"it holds no {name}, but {', '.join(known[:8]) or 'nothing'}")


def _matrices(content: bytes, order: str) -> Iterator[bytes]:
    """Yields the arrays of a file, unpacked, up to LARGEST bytes in total."""
    left = LARGEST
    for element in _elements(content, order):
        if element.kind == _MATRIX:
            yield element.data
        elif element.kind == _COMPRESSED:
            unpacked = zlib.decompressobj().decompress(element.data, left + 1)
            left -= len(unpacked)
            if left < 0:
                raise ValueError(f"it unpacks to more than {LARGEST >> 20} MB, and lists of numbers do not")
            yield from (inner.data for inner in _elements(unpacked, order) if inner.kind == _MATRIX)


def _elements(data: bytes, order: str) -> Iterator[Any]:
    """Yields the elements: each is a tag of type and size, the bytes, and padding to 8 bytes."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, at)
        start = at + 8
        if kind >> 16:  # the tag itself holds four bytes or fewer
            kind, size, start = kind & 0xFFFF, kind >> 16, at + 4
        if start + size > len(data) or (start == at + 4 and size > 4):
            raise ValueError("it is cut short, or damaged")
        yield _Element(kind, data[start : start + size], order)
        at = at + 8 if start == at + 4 else start + size
        if kind != _COMPRESSED:
            at += -at % 8


_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_IDS = {"official": {"train": "trnid", "test": "tstid"}, "swapped": {"train": "tstid", "test": "trnid"}}


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """A folder with jpg/ (102flowers.tgz unpacked), imagelabels.mat and setid.mat."""

    splits: Literal["official", "swapped"] = "official"
    """`swapped`: train on the 6149 images of the official test set and test on the 1020 of the official training
    set, as paddle.vision.datasets.Flowers and the classic PaddlePaddle examples do."""

    def build(self, split: str) -> Images:
        """Targets int64 0..101: the file's labels minus one."""
        root = existing_path(self.path, f"a folder with jpg/, imagelabels.mat and setid.mat, from {_PAGE}")
        images = inside(root, ("jpg",), "the folder that 102flowers.tgz unpacks to")
        labels = _column(root, "imagelabels.mat", "labels") - 1
        ids = _column(root, "setid.mat", _IDS[self.splits][checked_split(split)])
        if len(ids) == 0 or ids.min() < 1 or ids.max() > len(labels):
            raise DataError(f"{root}: setid.mat has numbers of images that imagelabels.mat does not label")
        files = [images / f"image_{number:05d}.jpg" for number in ids.tolist()]
        classes = tuple(f"flower {number}" for number in range(1, 103))
        return self.images(split, files, labels[ids - 1], classes)


def _column(root: Path, name: str, key: str) -> Array:
    """One list of numbers of a .mat file, int64 [n]."""
    return read_integers(inside(root, (name,), f"from {_PAGE}"), key)
