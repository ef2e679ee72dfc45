"""Images in Parquet files: a column with the images' files, and one with class numbers. Needs pyarrow.

An index of the row groups is made once, so rows are read in any order, and a resume begins anywhere.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, View, Views
from paddle_dp.datasets._labels import MOST_CLASSES, class_names, refuse_unknown
from paddle_dp.datasets._parquet import opened
from paddle_dp.datasets._paths import existing_path, files_of, refuse_test_files
from paddle_dp.datasets._row_groups import RowGroups, column_values, group_index
from paddle_dp.errors import DataError
from paddle_dp.units import Bytes


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """The folder that holds the Parquet files."""

    train: str = "train-*.parquet"
    """The files to train on: a pattern such as `train-*.parquet`, or a range such as `train-{000..146}.parquet`, each
    of which must exist."""

    test: str = "test-*.parquet"
    """The files to evaluate on."""

    image: str = "image"
    """The column with the images' files: bytes, or {bytes, path} as Hugging Face's data sets write it."""

    label: str = "label"
    """The column with class numbers."""

    names: str | None = None
    """A file in `path` with the classes' names: a line is `0 tench`, or the name alone, in the order of the numbers."""

    memory: Bytes = Bytes.parse("256 MB")
    """Row groups that each process keeps. Training reads an epoch in windows of half of it: its row groups in a random
    order, and the rows of a window in a random order."""

    cache: str | None = None
    """Folder for the index, which is made once; ~/.cache/paddle_dp by default."""

    def build(self, split: str) -> ParquetImages:
        """Targets int64, as in the files. Without `names` a class is named by its number."""
        root = existing_path(self.path, "the folder that holds the Parquet files")
        files = files_of(root, self.train, "train", "data-*.parquet")
        if split == "train":
            refuse_test_files(files, root, self.test)
        labels = learned = self._labels(files)
        if checked_split(split) == "test":
            files = files_of(root, self.test, "test", "validation-*.parquet")
            labels = self._labels(files)
            refuse_unknown(labels, learned, root / self.test, root / self.train)
        index = group_index(files, {self.image: "image"}, self.cache)
        _refuse_kind(files[0], self.image)
        rows = RowGroups(files, index, [self.image], self.memory, partial(_pictures, column=self.image))
        classes = class_names(root, self.names, int(learned.max()) + 1)
        return ParquetImages(rows, labels, classes, self.view(split))

    def _labels(self, files: list[Path]) -> Array:
        group_index(files, {self.image: "image", self.label: "label"}, self.cache)  # refuses absent columns
        return column_values(files, self.label, _class_numbers, self.cache, "labels")


class ParquetImages(Images):
    """Images in the row groups of Parquet files."""

    def __init__(self, rows: RowGroups[Any], labels: Array, classes: tuple[str, ...], view: View):
        super().__init__([], labels, classes, view)
        self._rows, self.epoch_order, self.file_of = rows, rows.order, rows.file_of

    def _source(self, index: int) -> Path | BinaryIO:
        pictures, row = self._rows.row(index)
        content = pictures[row].as_py()
        if content is None:
            raise DataError(f"{self._rows.name_of(index)} has no image: its bytes are null")
        return io.BytesIO(content)

    def name_of(self, index: int) -> str:
        return self._rows.name_of(index)


def _pictures(table: Any, name: str, column: str) -> Any:
    """The bytes of a group's images, as an array of pyarrow."""
    values = table.column(column).combine_chunks()
    return values.field("bytes") if hasattr(values, "field") else values


def _refuse_kind(file: Path, column: str) -> None:
    """Raises DataError for a column that does not hold files."""
    kind = opened(file).schema_arrow.field(column).type
    inner = {kind.field(n).name: kind.field(n).type for n in range(kind.num_fields)}
    if "binary" not in str(inner.get("bytes", kind)):
        raise DataError(
            f"{file}: column {column} is {kind}, not the bytes of image files. Pixels as numbers are read by "
            "dataset.use=parquet_arrays, and files by their paths by image_list"
        )


def _class_numbers(file: Path, column: Any) -> Array:
    """int64 [rows] of a column of whole numbers."""
    if column.null_count:
        raise DataError(f"{file}: {column.null_count} labels are null")
    numbers = column.to_numpy()
    if numbers.dtype.kind not in "iu":
        raise DataError(
            f"{file}: the labels are {column.type}, not class numbers: write them as whole numbers from 0"
        )
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < MOST_CLASSES:
        row = int(np.flatnonzero((numbers < 0) | (numbers >= MOST_CLASSES))[0])
        raise DataError(
            f"{file}:{row + 1}: {numbers[row]} is no class number, 0 to {MOST_CLASSES - 1:,} (Hugging Face writes -1 "
            "for the labels of a test split that it keeps back)"
        )
    return numbers.astype(np.int64)
