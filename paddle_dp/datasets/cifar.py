"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60000 pictures of 32x32, from their «python version»."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paddle_dp.datasets._arrays import one_of
from paddle_dp.datasets._paths import MissingDataError, given
from paddle_dp.datasets._pickled import read_pickled
from paddle_dp.datasets._pictures import AugmentedPictures, Pictures
from paddle_dp.errors import DataError
from paddle_dp.units import Count, Probability

_WHAT = "the folder or .tar.gz of CIFAR's python version, from https://www.cs.toronto.edu/~kriz/cifar.html"
_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")
_TEN = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
_HUNDRED = {"train": ("train",), "test": ("test",)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Whether it is CIFAR-10 or CIFAR-100, the files say. `pad: 0` and `flip: 0` leave the pictures as they are."""

    path: str | None = None
    """The archive, its unpacked folder, or what holds that."""

    labels: Literal["fine", "coarse"] = "fine"
    """`coarse` takes the 20 groups of CIFAR-100 instead of its 100 classes."""

    pad: Count = 4
    """To train, a picture is moved by up to so many pixels."""

    flip: Probability = 0.5
    """Chance that a picture is mirrored, to train."""

    mean: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)
    """Subtracted from each channel of 0..1."""

    std: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)
    """Each channel is divided by it."""

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise ValueError("std: a channel is divided by it, so it is more than 0")

    def build(self, split: str) -> Pictures | AugmentedPictures:
        """Inputs float32 [3, 32, 32], targets int64."""
        files = _files(given(self.path, _WHAT))
        hundred = "meta" in files
        names = (_HUNDRED if hundred else _TEN)[one_of(split)]
        word = f"{self.labels}_label" if hundred else "label"
        if not hundred and self.labels == "coarse":
            raise DataError(f"{self.path} is CIFAR-10, which has no coarse labels")
        (meta,) = _read(files, ["meta" if hundred else "batches.meta"], f"{word}_names")
        batches = list(_read(files, names, "data", f"{word}s"))
        pixels = np.concatenate([np.asarray(batch["data"], np.uint8) for batch in batches])
        labels = np.concatenate([np.asarray(batch[f"{word}s"], np.int64) for batch in batches])
        if pixels.shape != (len(labels), 3072):
            raise DataError(f"{self.path}: {len(labels)} labels and pictures of shape {list(pixels.shape)}")
        classes = tuple(map(str, meta[f"{word}_names"]))
        pictures = Pictures(pixels.reshape(-1, 3, 32, 32), labels, classes, self.mean, self.std)
        return AugmentedPictures(pictures, self.pad, self.flip) if self._moves(split) else pictures

    def _moves(self, split: str) -> bool:
        return split == "train" and bool(self.pad or self.flip)


def _files(path: Path) -> dict[str, bytes | Path]:
    """Where each file of the data set is, or what is in it, by its name."""
    if path.is_file():
        try:
            with tarfile.open(path) as archive:
                return {
                    Path(member.name).name: _content(archive, member) for member in archive if member.isfile()
                }
        except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
            raise DataError(f"{path} cannot be read as an archive: {error}") from error
    for folder in (path, *(path / name for name in _FOLDERS)):
        if (folder / "meta").is_file() or (folder / "batches.meta").is_file():
            return {file.name: file for file in folder.iterdir()}
    raise MissingDataError(f"dataset.path: {path} has no batches.meta and no meta in it; it is to be {_WHAT}")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = archive.extractfile(member)
    return stream.read() if stream else b""


def _read(files: dict[str, bytes | Path], names: Iterable[str], *words: str) -> Iterable[dict[str, Any]]:
    """The dict in each of these files; a DataError when one is missing, or has not got all `words`."""
    for name in names:
        if name not in files:
            raise DataError(f"the data set has no file {name}; it has {', '.join(sorted(files))}")
        place = files[name]
        found = read_pickled(place.read_bytes() if isinstance(place, Path) else place, str(name))
        if missing := [word for word in words if word not in found]:
            raise DataError(f"{name} has no {missing[0]}; it has {', '.join(map(str, found))}")
        yield found
