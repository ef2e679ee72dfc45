"""Images in tar files, laid out as webdataset's: `0001.jpg` and `0001.cls` are a sample. Nothing is unpacked.

An index of the samples is made once, so they are read in any order, and a resume begins anywhere.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, View, Views
from paddle_dp.datasets._labels import class_names, refuse_unknown
from paddle_dp.datasets._paths import existing_path, files_of, refuse_test_files
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
    """End of the image's name, where a sample has several: `seg.png`. null: the only one with a suffix of
    images."""

    label: str = "cls"
    """End of the name of the file with the class number: `cls`, a text; or `json.label`, the field `label` of a
    JSON object."""

    names: str | None = None
    """A file in `path` with the classes' names: a line is `0 tench`, or the name alone, in the order of the numbers."""

    cache: str | None = None
    """Folder for the index, which is made once; ~/.cache/paddle_dp by default."""

    def build(self, split: str) -> TarImages:
        """Targets int64, as in the files. Without `names` a class is named by its number."""
        root = existing_path(self.path, "the folder that holds the tar files")
        files = files_of(root, self.train, "train", "data-*.tar")
        if split == "train":
            refuse_test_files(files, root, self.test)
        index = learned = shard_index(files, self.image, self.label, self.cache)
        if checked_split(split) == "test":
            files = files_of(root, self.test, "test", "data-*.tar")
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
