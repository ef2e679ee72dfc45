"""Images in tar files, laid out as webdataset's: `0001.jpg` and `0001.cls` are a sample. Nothing is unpacked.

An index of the samples is made once, so they are read in any order, and a resume begins anywhere.
"""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, View, Views
from paddle_dp.datasets._labels import class_names, refuse_unknown
from paddle_dp.datasets._paths import MissingDataError, existing_path
from paddle_dp.datasets._tars import TarShards, shard_index


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """The folder that holds the tar files."""

    train: str = "train-*.tar"
    """The files to train on: a pattern such as `train-*.tar`, or a range such as `train-{000..146}.tar`, each of which
    must exist."""

    test: str = "val-*.tar"
    """The files to evaluate on."""

    image: str | None = None
    """What the image's name ends in, where a sample has several: `seg.png`. null: the only one with a suffix of
    images."""

    label: str = "cls"
    """What the name of the file with the class number ends in: `cls`, a text; or `json.label`, the field `label` of a
    JSON object."""

    names: str | None = None
    """A file in `path` with the classes' names: a line is `0 tench`, or the name alone, in the order of the numbers."""

    cache: str | None = None
    """Folder for the index, which is made once; ~/.cache/paddle_dp by default."""

    def build(self, split: str) -> TarImages:
        """Targets int64, as in the files. Without `names` a class is named by its number."""
        root = existing_path(self.path, "the folder that holds the tar files")
        train = _shards(root, self.train, "train")
        index = learned = shard_index(train, self.image, self.label, self.cache)
        files = train
        if checked_split(split) == "test":
            files = _shards(root, self.test, "test")
            index = shard_index(files, self.image, self.label, self.cache)
            refuse_unknown(index["label"], learned["label"], root / self.test, root / self.train)
        classes = class_names(root, self.names, int(learned["label"].max()) + 1)
        return TarImages(TarShards(files), index, classes, self.view(split))


class TarImages(Images):
    """Images in tar files; `index` is of `_tars.shard_index`. A process reads each shard through one descriptor."""

    def __init__(self, shards: TarShards, index: Array, classes: tuple[str, ...], view: View):
        super().__init__([], index["label"].astype("int64"), classes, view)
        self._shards, self._index = shards, index

    def _source(self, index: int) -> Path | BinaryIO:
        row = self._index[index]
        return io.BytesIO(self._shards.read(int(row["shard"]), int(row["offset"]), int(row["size"])))

    def name_of(self, index: int) -> str:
        member = bytes(self._index[index]["name"]).decode("utf-8", "replace")
        return f"{self.file_of(index)}: {member}"

    def file_of(self, index: int) -> str:
        return str(self._shards.files[self._index[index]["shard"]])


def _shards(root: Path, pattern: str, setting: str) -> list[Path]:
    """The files of a pattern in `root`, sorted, or of a range, in its order. Raises MissingDataError for none, and for
    one of a range that does not exist."""
    ranges = re.findall(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not ranges:
        files = sorted(root.glob(pattern)) if not Path(pattern).is_absolute() else [Path(pattern)]
    else:
        numbers = [[str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)] for low, high in ranges]
        pieces = re.split(r"\{\d+\.\.\d+\}", pattern)
        files = [
            root / "".join(itertools.chain(*zip(pieces, [*chosen, ""], strict=True)))
            for chosen in itertools.product(*numbers)
        ]
    absent = next((file for file in files if not file.is_file()), None)
    if not files or absent is not None:
        there = sorted(entry.name for entry in root.iterdir())[:8] if root.is_dir() else []
        has = f"{root} has {', '.join(there) or 'nothing'}"
        raise MissingDataError(
            f"dataset.{setting}: {absent or root / pattern} does not exist; {has}. Give the pattern of the tar files, "
            f"such as dataset.{setting}='data-*.tar'"
        )
    return files
