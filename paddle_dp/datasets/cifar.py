"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), 60000 pictures of 32x32 pixels, from their "python version".

The files are pickles, which are read as data, without calling anything in them. An archive is unpacked into memory.
"""

from __future__ import annotations

import gzip
import random
import tarfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images
from paddle_dp.datasets._paths import MissingDataError, existing_path
from paddle_dp.errors import DataError
from paddle_dp.units import Count, Probability
from paddle_dp.unpickle import ARRAYS, PickleMachine

if TYPE_CHECKING:
    from PIL.Image import Image

_DESCRIPTION = (
    "the folder or .tar.gz of CIFAR's python version, from https://www.cs.toronto.edu/~kriz/cifar.html"
)
_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")
_CIFAR10 = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
_CIFAR100 = {"train": ("train",), "test": ("test",)}
LARGEST = 256 << 20  # bytes of a file; CIFAR-100's largest has 155 million
MOST = 2_000_000  # operations; that file has some 250 thousand


@dataclass(frozen=True, kw_only=True)
class Config:
    """CIFAR-10 or CIFAR-100, as the files are. `pad: 0` with `flip: 0` switches augmentation off."""

    path: str | None = None
    """The archive, its unpacked folder, or the folder that holds it."""

    labels: Literal["fine", "coarse"] = "fine"
    """`coarse`: the 20 groups of CIFAR-100 instead of its 100 classes."""

    pad: Count = 4
    """Training: largest random shift of a picture, in pixels."""

    flip: Probability = 0.5
    """Training: probability of a horizontal flip."""

    mean: tuple[float, float, float] = (0.4914, 0.4822, 0.4465)
    """Subtracted from each channel, whose values are 0..1."""

    std: tuple[float, float, float] = (0.2470, 0.2435, 0.2616)
    """Divisor of each channel."""

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise ValueError("std: every channel is divided by it: give numbers above 0")

    def read_file(self, path: Path) -> list[tuple[Array, None]]:
        """Reads an image of any size as a held-out sample's input, resized to 32x32. Raises DataError with the path."""
        pixels = np.asarray(Images([path], np.zeros(1, np.int64), (), _small)[0][0])
        pictures = Pictures(pixels[None], np.zeros(1, np.int64), (), self.mean, self.std)
        return [(pictures[0][0], None)]

    def build(self, split: str) -> Pictures | AugmentedPictures:
        """Inputs float32 [3, 32, 32], targets int64."""
        files = _files(existing_path(self.path, _DESCRIPTION))
        is_cifar100 = "meta" in files
        names = (_CIFAR100 if is_cifar100 else _CIFAR10)[checked_split(split)]
        label = f"{self.labels}_label" if is_cifar100 else "label"
        if not is_cifar100 and self.labels == "coarse":
            raise DataError(f"{self.path} is CIFAR-10, which has no coarse labels")
        (meta,) = _read(files, ["meta" if is_cifar100 else "batches.meta"], f"{label}_names")
        batches = list(_read(files, names, "data", f"{label}s"))
        pixels = np.concatenate([_array(batch, "data", np.uint8) for batch in batches])
        labels = np.concatenate([_array(batch, f"{label}s", np.int64) for batch in batches])
        if pixels.shape != (len(labels), 3072):
            raise DataError(f"{self.path}: {len(labels)} labels and pictures of shape {list(pixels.shape)}")
        classes = tuple(map(str, meta[f"{label}_names"]))
        pictures = Pictures(pixels.reshape(-1, 3, 32, 32), labels, classes, self.mean, self.std)
        is_augmented = split == "train" and (self.pad or self.flip)
        return AugmentedPictures(pictures, self.pad, self.flip) if is_augmented else pictures


def _small(image: Image) -> Array:
    """Resizes an image to uint8 [3, 32, 32]."""
    return np.asarray(image.resize((32, 32)), np.uint8).transpose(2, 0, 1)


def _files(path: Path) -> dict[str, bytes | Path]:
    """The files of the data set by name: paths, or contents if they are in an archive."""
    if path.is_file():
        return dict(unpacked(path, LARGEST))
    for folder in (path, *(path / name for name in _FOLDERS)):
        if (folder / "meta").is_file() or (folder / "batches.meta").is_file():
            return {file.name: file for file in folder.iterdir()}
    raise MissingDataError(f"dataset.path: {path} has no batches.meta and no meta in it; give {_DESCRIPTION}")


def _read(files: dict[str, bytes | Path], names: Iterable[str], *keys: str) -> Iterable[dict[str, Any]]:
    """Yields the dict in each of these files. Raises DataError if a file or one of `keys` is missing."""
    for name in names:
        if name not in files:
            raise DataError(f"the data set has no file {name}; it has {', '.join(sorted(files))}")
        packed = files[name]
        if isinstance(packed, Path):
            with packed.open("rb") as stream:
                packed = stream.read(LARGEST + 1)  # `read_pickled` refuses a larger file
        content = read_pickled(packed, name)
        if missing := [key for key in keys if key not in content]:
            raise DataError(f"{name} has no {missing[0]}; it has {', '.join(map(str, content))}")
        yield content


def _array(batch: dict[str, Any], key: str, dtype: Any) -> Array:
    try:
        return np.asarray(batch[key], dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the data set's {key} are not numbers of {np.dtype(dtype)}: {error}") from error


def read_pickled(content: bytes, location: str) -> dict[str, Any]:
    """The dict in a pickle: its values are arrays, numbers, texts, or lists of these. Raises DataError for anything
    else."""
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MB")
        loaded = PickleMachine(ARRAYS, most=MOST).run(content)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{location} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{location} holds a {type(loaded).__name__}, not a dict")
    return loaded


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
                return _members(archive, largest)
    except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an archive (.tar.gz or .tar): {error}") from error


def _members(archive: tarfile.TarFile, largest: int) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for member in archive:
        largest -= member.size  # counts a sparse file's holes, too
        if largest < 0:
            raise ValueError(f"{member.name} is too large for this data set")
        if member.isfile() and (stream := archive.extractfile(member)) is not None:
            contents[Path(member.name).name] = stream.read()
    return contents


class Pictures:
    """Pictures uint8 [n, channels, height, width], scaled to 0..1 and normalised by each channel's `mean` and `std`."""

    def __init__(
        self,
        pixels: Array,
        labels: Array,
        classes: tuple[str, ...],
        mean: Sequence[float],
        std: Sequence[float],
    ):
        self.pixels, self.labels, self.classes = pixels, labels, classes
        self._mean = 255 * np.array(mean, np.float32)[:, None, None]
        self._std = 255 * np.array(std, np.float32)[:, None, None]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, indices: int | Array) -> tuple[Array, Any]:
        return self.normalised(self.pixels[indices]), self.labels[indices]

    take = __getitem__

    def normalised(self, pixels: Array) -> Array:
        """Normalises pixels to float32 of the same shape."""
        return (pixels.astype(np.float32) - self._mean) / self._std


class AugmentedPictures:
    """The same pictures, randomly shifted by up to `pad` pixels, padded with 0, and flipped with probability `flip`.

    It has no `take`, because random numbers are seeded per sample.
    """

    def __init__(self, pictures: Pictures, pad: int, flip: float):
        self.pictures, self.classes = pictures, pictures.classes
        self._pad, self._flip = pad, flip

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Array, np.int64]:
        pixels, pad = self.pictures.pixels[index], self._pad
        _, height, width = pixels.shape
        top, left = random.randint(0, 2 * pad), random.randint(0, 2 * pad)
        padded = np.pad(pixels, ((0, 0), (pad, pad), (pad, pad)))
        cropped = padded[:, top : top + height, left : left + width]
        if random.random() < self._flip:
            cropped = cropped[:, :, ::-1]
        return self.pictures.normalised(cropped), self.pictures.labels[index]
