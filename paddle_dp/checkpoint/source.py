"""Where weights come from: something that reads any box of a tensor by its name in the model.

A checkpoint of ours is one, of any layout, and so is a safetensors file with a model's own names, such as `merge`
writes. Another format is another class here; other names are another step between a source and `train.initial`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np

from paddle_dp.checkpoint.folder import find, find_at
from paddle_dp.checkpoint.loading import Checkpoint, load
from paddle_dp.checkpoint.manifest import MANIFEST, checkpoints, content_of
from paddle_dp.checkpoint.tensor_file import read_header, read_rows
from paddle_dp.errors import CheckpointError, UsageError, did_you_mean

_MODEL = "model/"
_FILE = ".safetensors"


class Source(Protocol):
    """Tensors by name. `folder`: where they are, for messages."""

    folder: Path

    @property
    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """The box of this shape at `offset`, by default the whole tensor, as a new array; bfloat16 as uint16."""
        ...


class WeightsOf:
    """The weights and buffers of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self._of, self.folder = checkpoint, checkpoint.folder

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.removeprefix(_MODEL) for name in self._of.names if name.startswith(_MODEL))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of.shape(_MODEL + name)

    def dtype(self, name: str) -> str:
        return self._of.dtype(_MODEL + name)

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        return self._of.read(_MODEL + name, offset, shape)


class SafetensorsFile:
    """One safetensors file. Raises CheckpointError if it is none, or cannot be read."""

    def __init__(self, path: Path):
        self.folder = path
        try:
            with content_of(path):
                self._infos = read_header(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._infos))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape

    def dtype(self, name: str) -> str:
        return self._infos[name].dtype

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        info = self._infos[name]
        start = tuple(offset or (0,) * len(info.shape))
        size = tuple(info.shape if shape is None else shape)
        box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        columns = (slice(None), *box[1:])
        rows = read_rows(self.folder, info, box[0] if box else None)
        return np.ascontiguousarray(rows[columns]) if box else rows


def source(path: Path) -> Source:
    """The weights at `path`: a checkpoint, a run (its newest), RUN/best, RUN/STEP, or a safetensors file.

    A checkpoint is verified, every byte of it. Raises CheckpointError, UsageError if there is none.
    """
    if (file := _file(path)) is not None:
        return file
    if not path.exists():
        return WeightsOf(load(find(path.name, path.parent / "checkpoints")))
    return WeightsOf(load(find_at(path)))


def outline(path: Path) -> Source:
    """As `source`, without reading a checkpoint's bytes: names and shapes are known, and a damaged tensor is not seen.

    Of a run that is its newest checkpoint that can be opened. Raises CheckpointError, OSError, UsageError if there is
    none.
    """
    if (file := _file(path)) is not None:
        return file
    failed = None
    for checkpoint in _candidates(path):
        try:
            return WeightsOf(load(checkpoint, verify=False))
        except CheckpointError as error:
            failed = failed or error
    assert failed is not None, "there is a candidate"
    raise failed


def _file(path: Path) -> Source | None:
    """The safetensors file at `path`; None where `path` is to be a checkpoint's. UsageError if nothing is there."""
    if path.suffix == _FILE:
        if not path.is_file():
            raise UsageError(f"load.path: there is no file {path}.")
        return SafetensorsFile(path)
    if not path.exists() and not (path.name in ("best", "newest") or path.name.isdecimal()):
        raise UsageError(
            f"load.path: there is no {path}. It is a checkpoint, a run's folder (its newest one), RUN/best, RUN/STEP "
            f"or a {_FILE} file."
        )
    return None


def _candidates(path: Path) -> list[Path]:
    """The checkpoints that `path` may mean, one at least, the best first."""
    if not path.exists() and path.name != "newest":
        return [find(path.name, path.parent / "checkpoints")]
    if (path / MANIFEST).exists():
        return [path]
    run = path if path.exists() else path.parent
    return checkpoints(run / "checkpoints")[::-1] or checkpoints(path)[::-1] or [find_at(path)]


def check_patterns(only: Iterable[str], names: Iterable[str], whose: str) -> None:
    """Raises UsageError for a pattern of load.only that matches none of these tensors' names."""
    names = list(names)
    for pattern in only:
        if not any(fits(name, pattern) for name in names):
            layers = {name.rpartition(".")[0] or name for name in names}
            hint = did_you_mean(pattern.rstrip(".*"), layers, "Its layers:")
            raise UsageError(f"load.only: '{pattern}' matches nothing {whose}.{hint}")


def fits(name: str, pattern: str) -> bool:
    """Whether a tensor's name is meant: by a pattern with stars, or by the layer that it is in."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
