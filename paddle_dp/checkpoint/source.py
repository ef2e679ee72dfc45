"""Sources of weights, which read any box of a tensor by its name.

Sources are a checkpoint of any layout, safetensors files and pickle files (`checkpoint.pickled`), single or with an
index as in a Hugging Face folder. `checkpoint.other_names` wraps a source with other names than the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from paddle_dp.checkpoint.shards import Dims
from paddle_dp.checkpoint.tensor_file import read_header, read_metadata, read_rows
from paddle_dp.checkpoint.tensors import WeightSource, box_at
from paddle_dp.errors import CheckpointError, UsageError, did_you_mean, similar

_MODEL, _EMA = "model/", "ema/"
# The first of these that exists in a folder is read, in the order of Hugging Face's libraries; then PaddleNLP's.
_IN_FOLDER = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
    "model_state.pdparams.index.json", "model_state.pdparams",
)  # fmt: skip
_KINDS = (
    "a checkpoint, a run's folder (its newest one), RUN/best, RUN/STEP, a folder of Hugging Face's, or a file: "
    ".safetensors, .pdparams, .bin, .pt, .pth or .index.json"
)


class Opened(WeightSource, Protocol):
    """A source on disk. `from_torch`: True if PyTorch wrote it, so Linear is [outputs, inputs]; None if unknown."""

    from_torch: bool | None


class WeightsOf:
    """The weights and buffers of a checkpoint; with `ema`, averages replace the weights that have one.

    Raises CheckpointError for an adapter's checkpoint, unless it is read for its `adapter`, and with `ema` for one
    without averages.
    """

    from_torch: bool | None = False

    def __init__(self, checkpoint: Checkpoint, *, ema: bool = False, adapter: bool = False):
        self._checkpoint, self.folder = checkpoint, checkpoint.folder
        if "base" in checkpoint.state and not adapter:
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

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        return self._checkpoint.read(self._saved(name), offset, shape)

    def _saved(self, name: str) -> str:
        return f"{_EMA if name in self._averaged else _MODEL}{name}"


class SafetensorsFile:
    """One safetensors file. Raises CheckpointError if it has another format or cannot be read."""

    def __init__(self, path: Path):
        self.folder, self._file = path, path.resolve()  # a hub's cache consists of links
        try:
            with content_of(path):
                self._infos = read_header(self._file)
                written = read_metadata(self._file).get("format")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        # PaddleNLP and PaddleFormers save "np"; weights that they convert to transformers' layout, "pt".
        self.from_torch: bool | None = {"pt": True, "pd": False, "np": False}.get(str(written))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._infos))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._infos[name].shape

    def dtype(self, name: str) -> str:
        return self._infos[name].dtype

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        info = self._infos[name]
        slices = box_at(self, name, offset, shape).slices
        columns = (slice(None), *slices[1:])
        rows = read_rows(self._file, info, slices[0] if slices else None)
        return np.ascontiguousarray(rows[columns]) if slices else rows


class IndexedFiles:
    """Several files of weights with an index that maps tensors to files.

    Raises CheckpointError for an invalid index, a missing file, or a tensor that its file lacks.
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
                raise CheckpointError(f"{index} names {file}, and there is no such file next to it.")
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

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        return self._in(name).read(name, offset, shape)

    def _in(self, name: str) -> WeightSource:
        return self._sources[self._files[name]]


def _weight_map(content: Mapping[str, object]) -> dict[str, str]:
    files = json_codec.mapping(content["weight_map"], "weight_map")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix not in _OPENERS:
            raise ValueError(f"{name} is to be in {str(file)[:80]!r}, which is no file next to the index")
    return files


_OPENERS: dict[str, Callable[[Path], Opened]] = {
    ".safetensors": SafetensorsFile, ".pdparams": PickledFile, ".bin": PickledFile, ".pt": PickledFile,
    ".pth": PickledFile,
}  # fmt: skip


def _opened(file: Path) -> Opened:
    return IndexedFiles(file) if file.name.endswith(".index.json") else _OPENERS[file.suffix](file)


def source(path: Path) -> Opened:
    """Opens the weights at `path`: a checkpoint, a run (its newest), RUN/best, RUN/STEP, a file, or a Hugging Face
    folder.

    Every byte of a checkpoint is verified. Raises CheckpointError; UsageError if nothing is there.
    """
    if (file := _file(path)) is not None:
        return file
    if not path.exists():
        return WeightsOf(load(find(path.name, path.parent / "checkpoints")))
    return WeightsOf(load(find_at(path)))


def outline(path: Path) -> Opened:
    """Like `source`, but does not verify a checkpoint's bytes: names and shapes are known, a damaged tensor is not
    detected.

    For a run, opens the newest checkpoint that can be opened. Raises CheckpointError, OSError; UsageError if nothing is
    there.
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
    """Opens the file of weights at `path`, or the one in a Hugging Face folder; None if `path` must be a checkpoint's.
    Raises UsageError if nothing is there, or for an unknown format."""
    known = path.suffix in _OPENERS or path.name.endswith(".index.json")
    if path.is_file() and not known:
        raise UsageError(f"load.path: {path} has no known format. Give {_KINDS}.")
    if known and not path.is_dir():
        if not path.is_file():
            raise UsageError(f"load.path: there is no file {path}.")
        return _opened(path)
    if (path / "adapter_model.safetensors").is_file():
        raise UsageError(
            f"load.path: {path} holds a LoRA of PEFT's: give its base model here, and {{use: lora, load: {path}}} as "
            "adapter."
        )
    if inside := next((path / name for name in _IN_FOLDER if (path / name).is_file()), None):
        return _opened(inside)
    if not path.exists() and not (path.name in ("best", "newest") or path.name.isdecimal()):
        raise UsageError(f"load.path: there is no {path}. Give {_KINDS}.")
    return None


def _candidates(path: Path) -> list[Path]:
    """The checkpoints that `path` may mean, at least one, preferred first."""
    if not path.exists() and path.name != "newest":
        return [find(path.name, path.parent / "checkpoints")]
    if (path / MANIFEST).exists():
        return [path]
    run = path if path.exists() else path.parent
    return checkpoints(run / "checkpoints")[::-1] or checkpoints(path)[::-1] or [find_at(path)]


def check_patterns(only: Iterable[str], names: Iterable[str], location: str) -> None:
    """Raises UsageError for a pattern of load.only that matches none of `names`."""
    names = list(names)
    for pattern in only:
        if not any(fits(name, pattern) for name in names):
            layers = {name.rpartition(".")[0] or name for name in names}
            hint = did_you_mean(pattern.rstrip(".*"), layers, "Its layers:", similar)
            raise UsageError(f"load.only: '{pattern}' matches nothing {location}.{hint}")


def fits(name: str, pattern: str) -> bool:
    """True if a tensor's name matches a pattern with stars, or lies in the layer `pattern`."""
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
