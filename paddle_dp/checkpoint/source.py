"""Where weights come from: something that reads any box of a tensor by its name.

A checkpoint of ours is one, of any layout, and so are safetensors and pickle files (`checkpoint.pickled`), alone or
several with an index, as in a folder of Hugging Face's. Other names than the model's are another source around these
(`checkpoint.translated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import read_bytes
from paddle_dp.checkpoint.folder import find, find_at
from paddle_dp.checkpoint.loading import Checkpoint, load
from paddle_dp.checkpoint.manifest import MANIFEST, checkpoints, content_of
from paddle_dp.checkpoint.merge import averages_in
from paddle_dp.checkpoint.pickled import PickledFile
from paddle_dp.checkpoint.tensor_file import read_header, read_metadata, read_rows
from paddle_dp.errors import CheckpointError, UsageError, did_you_mean, similar

_MODEL, _EMA = "model/", "ema/"
# In a folder, the first of these that is there, as Hugging Face's libraries look for them.
_IN_FOLDER = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
)  # fmt: skip
_KINDS = (
    "a checkpoint, a run's folder (its newest one), RUN/best, RUN/STEP, a folder of Hugging Face's, or a file: "
    ".safetensors, .pdparams, .bin, .pt, .pth or .index.json"
)


class WeightSource(Protocol):
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


class Opened(WeightSource, Protocol):
    """A source on disk. `from_torch`: whether PyTorch wrote it, where that is known: its Linear is [outputs,
    inputs]."""

    from_torch: bool | None


class WeightsOf:
    """The weights and buffers of a checkpoint; with `ema`, the averages in place of the weights that have one."""

    from_torch: bool | None = False

    def __init__(self, checkpoint: Checkpoint, *, ema: bool = False):
        self._checkpoint, self.folder = checkpoint, checkpoint.folder
        if "base" in checkpoint.state:
            raise CheckpointError(
                f"{self.folder} holds an adapter without the weights that it stands on. Merge them first: paddle-dp "
                f"merge {self.folder} -o FILE, and take FILE."
            )
        self._averaged = averages_in(checkpoint) if ema else frozenset[str]()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name.removeprefix(_MODEL) for name in self._checkpoint.names if name.startswith(_MODEL))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._saved(name))

    def dtype(self, name: str) -> str:
        return self._checkpoint.dtype(self._saved(name))

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        return self._checkpoint.read(self._saved(name), offset, shape)

    def _saved(self, name: str) -> str:
        return f"{_EMA if name in self._averaged else _MODEL}{name}"


class SafetensorsFile:
    """One safetensors file. Raises CheckpointError if it is none, or cannot be read."""

    def __init__(self, path: Path):
        self.folder, self._file = path, path.resolve()  # a hub's cache is made of links
        try:
            with content_of(path):
                self._infos = read_header(self._file)
                written = read_metadata(self._file).get("format")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        self.from_torch: bool | None = {"pt": True, "pd": False}.get(str(written))

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
        rows = read_rows(self._file, info, box[0] if box else None)
        return np.ascontiguousarray(rows[columns]) if box else rows


class IndexedFiles:
    """Several files of weights with an index: which tensor is in which of them.

    Raises CheckpointError for an index that makes no sense, a file that is missing, or a tensor that is not where it is
    said to be.
    """

    def __init__(self, index: Path):
        self.folder = index
        try:
            with content_of(index):
                content = json_codec.mapping(
                    json_codec.decode(read_bytes(index.resolve(), json_codec.MOST_BYTES)), index.name
                )
                self._files = _weight_map(content)
        except OSError as error:
            raise CheckpointError(f"{index} cannot be read: {error.strerror}.") from None
        self._sources: dict[str, Opened] = {}
        for file in sorted(set(self._files.values())):
            if not (index.parent / file).is_file():
                raise CheckpointError(f"{index} names {file}, and there is no such file beside it.")
            self._sources[file] = _opened(index.parent / file)
        there = {file: set(source.names) for file, source in self._sources.items()}
        for name, file in self._files.items():
            if name not in there[file]:
                raise CheckpointError(f"{index} says that {name} is in {file}, and it is not.")
        kinds = {source.from_torch for source in self._sources.values()}
        self.from_torch: bool | None = kinds.pop() if len(kinds) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._files))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._in(name).shape(name)

    def dtype(self, name: str) -> str:
        return self._in(name).dtype(name)

    def read(
        self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> np.ndarray:
        return self._in(name).read(name, offset, shape)

    def _in(self, name: str) -> WeightSource:
        return self._sources[self._files[name]]


def _weight_map(content: Mapping[str, object]) -> dict[str, str]:
    files = json_codec.mapping(content["weight_map"], "weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix not in _OPENERS:
            raise ValueError(f"{name} is to be in {str(file)[:80]!r}, which is no file beside the index")
    return files


_OPENERS: dict[str, Callable[[Path], Opened]] = {
    ".safetensors": SafetensorsFile, ".pdparams": PickledFile, ".bin": PickledFile, ".pt": PickledFile,
    ".pth": PickledFile,
}  # fmt: skip


def _opened(file: Path) -> Opened:
    return IndexedFiles(file) if file.name.endswith(".index.json") else _OPENERS[file.suffix](file)


def source(path: Path) -> Opened:
    """The weights at `path`: a checkpoint, a run (its newest), RUN/best, RUN/STEP, a file, or a folder of Hugging
    Face's.

    A checkpoint is verified, every byte of it. Raises CheckpointError, UsageError if there is none.
    """
    if (file := _file(path)) is not None:
        return file
    if not path.exists():
        return WeightsOf(load(find(path.name, path.parent / "checkpoints")))
    return WeightsOf(load(find_at(path)))


def outline(path: Path) -> Opened:
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


def _file(path: Path) -> Opened | None:
    """The file of weights at `path`, or the one in a folder of Hugging Face's; None where `path` is to be a
    checkpoint's. UsageError if nothing is there, or of another format."""
    known = path.suffix in _OPENERS or path.name.endswith(".index.json")
    if path.is_file() and not known:
        raise UsageError(f"load.path: {path} is of no format that is known. What is, is {_KINDS}.")
    if known and not path.is_dir():
        if not path.is_file():
            raise UsageError(f"load.path: there is no file {path}.")
        return _opened(path)
    if inside := next((path / name for name in _IN_FOLDER if (path / name).is_file()), None):
        return _opened(inside)
    if not path.exists() and not (path.name in ("best", "newest") or path.name.isdecimal()):
        raise UsageError(f"load.path: there is no {path}. It is {_KINDS}.")
    return None


def _candidates(path: Path) -> list[Path]:
    """The checkpoints that `path` may mean, one at least, the best first."""
    if not path.exists() and path.name != "newest":
        return [find(path.name, path.parent / "checkpoints")]
    if (path / MANIFEST).exists():
        return [path]
    run = path if path.exists() else path.parent
    return checkpoints(run / "checkpoints")[::-1] or checkpoints(path)[::-1] or [find_at(path)]


def check_patterns(only: Iterable[str], names: Iterable[str], location: str) -> None:
    """Raises UsageError for a pattern of load.only that matches none of these tensors' names."""
    names = list(names)
    for pattern in only:
        if not any(fits(name, pattern) for name in names):
            layers = {name.rpartition(".")[0] or name for name in names}
            hint = did_you_mean(pattern.rstrip(".*"), layers, "Its layers:", similar)
            raise UsageError(f"load.only: '{pattern}' matches nothing {location}.{hint}")


def fits(name: str, pattern: str) -> bool:
    """Whether a tensor's name is meant: by a pattern with stars, or by the layer that it is in."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
