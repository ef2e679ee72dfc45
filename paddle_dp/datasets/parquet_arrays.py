"""Numbers in Parquet files: columns as the input, and one as the target. Needs pyarrow.

An index of the row groups is made once, so rows are read in any order, and a resume begins anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._paths import existing_path, files_of, refuse_test_files
from paddle_dp.datasets._row_groups import RowGroups, group_index
from paddle_dp.errors import DataError
from paddle_dp.units import Bytes, Positive

Samples = Array | list[Array]
"""The arrays of a group's rows: an array [rows, …], or a list where their lengths differ."""


@dataclass(frozen=True, kw_only=True)
class Config:
    path: str | None = None
    """The folder that holds the Parquet files."""

    train: str = "train-*.parquet"
    """The files to train on: a pattern such as `train-*.parquet`, or a range such as `train-{000..146}.parquet`, each
    of which must exist."""

    test: str = "test-*.parquet"
    """The files to evaluate on."""

    inputs: tuple[str, ...] = ("inputs",)
    """The columns of the input. Several ones, of numbers or of lists, are one vector in this order; the lists of a
    single one may be nested, or differ in length (`loader.pad`)."""

    target: str = "target"
    """The column of the target: whole numbers become int64, others float32."""

    shape: tuple[Positive, ...] | None = None
    """Of an input, such as [3, 32, 32]; null: as the column has it."""

    dtype: Literal["float32", "int64"] = "float32"
    """Of the inputs. `int64` is for tokens."""

    memory: Bytes = Bytes.parse("256 MB")
    """Row groups that each process keeps, as arrays. Training reads an epoch in windows of half of it: its row groups
    in a random order, and the rows of a window in a random order."""

    cache: str | None = None
    """Folder for the index, which is made once; ~/.cache/paddle_dp by default."""

    def __post_init__(self) -> None:
        if not self.inputs or len({*self.inputs}) < len(self.inputs):
            raise ValueError("inputs: needs the names of columns, each once")

    def build(self, split: str) -> ParquetArrays:
        """Inputs of `dtype`, targets int64 or float32."""
        root = existing_path(self.path, "the folder that holds the Parquet files")
        pattern, setting = (self.train, "train") if checked_split(split) == "train" else (self.test, "test")
        files = files_of(root, pattern, setting, "data-*.parquet")
        if setting == "train":
            refuse_test_files(files, root, self.test)
        settings = {**dict.fromkeys(self.inputs, "inputs"), self.target: "target"}
        arrays = [*((column, self.dtype) for column in self.inputs), (self.target, None)]
        index = group_index(files, settings, self.cache, arrays)
        return ParquetArrays(RowGroups(files, index, [*settings], self.memory, self._samples))

    def _samples(self, table: Any, name: str) -> tuple[Samples, Samples]:
        """Inputs and targets of a row group."""
        columns = [_converted(table, column, name, self.dtype) for column in self.inputs]
        inputs = columns[0] if len(columns) == 1 else _joined(columns, self.inputs, name)
        if self.shape is not None:
            if not isinstance(inputs, np.ndarray) or inputs[0].size != np.prod(self.shape):
                sizes = sorted({each.size for each in inputs})
                numbers = f"{sizes[0]}{f' to {sizes[-1]}' if sizes[1:] else ''}"
                raise DataError(
                    f"{name}: inputs have {numbers} numbers, and dataset.shape {list(self.shape)} has "
                    f"{np.prod(self.shape)}"
                )
            inputs = inputs.reshape(len(inputs), *self.shape)
        return inputs, _converted(table, self.target, name, None)


class ParquetArrays:
    """Rows of Parquet files as pairs of arrays."""

    def __init__(self, rows: RowGroups[tuple[Samples, Samples]]):
        self._rows = rows
        self.epoch_order, self.name_of, self.file_of = rows.order, rows.name_of, rows.file_of

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} is not one of {len(self)} samples")
        (inputs, targets), row = self._rows.row(index)
        return inputs[row], targets[row]


def _joined(columns: Sequence[Samples], names: Sequence[str], name: str) -> Array:
    """[rows, numbers] of columns [rows] or [rows, n], side by side."""
    flat = []
    for column, of_column in zip(columns, names, strict=True):
        if not isinstance(column, np.ndarray) or column.ndim > 2:
            raise DataError(
                f"{name}: the lists of column {of_column} are nested or differ in length, so it cannot be joined "
                "with other columns: read it alone, dataset.inputs"
            )
        flat.append(column.reshape(len(column), -1))
    return np.concatenate(flat, axis=1)


def _converted(table: Any, column: str, name: str, dtype: str | None) -> Samples:
    """The numbers of a column as `dtype`, by default int64 or float32. Raises DataError for nulls, for values that are
    no numbers, and for those that the dtype does not hold."""
    import pyarrow.compute as pc

    values, shape = table.column(column).combine_chunks(), [table.num_rows]
    lengths = None  # of the rows' lists, if they differ
    while True:
        if values.null_count:
            raise DataError(
                f"{name}: column {column} has {values.null_count} nulls: fill them in, or remove the rows"
            )
        if "list" not in str(values.type).partition("<")[0]:
            break
        sizes = pc.list_value_length(values).to_numpy(zero_copy_only=False)
        if lengths is not None or (len({*sizes.tolist()}) > 1 and len(shape) > 1):
            raise DataError(f"{name}: the nested lists of column {column} differ in length")
        if len({*sizes.tolist()}) > 1:
            lengths = sizes
        else:
            shape.append(int(sizes[0]) if len(sizes) else 0)
        values = values.flatten()
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind not in "iufb":
        raise DataError(
            f"{name}: column {column} is {table.column(column).type}, not numbers or lists of them"
        )
    dtype = dtype or ("float32" if numbers.dtype.kind == "f" else "int64")
    array = _exact(numbers, dtype, f"{name}: column {column}")
    return array.reshape(shape) if lengths is None else np.split(array, np.cumsum(lengths)[:-1])


def _exact(numbers: Array, dtype: str, name: str) -> Array:
    """The numbers as `dtype`: float32 rounds fractions, and nothing else is changed. Raises DataError."""
    with np.errstate(all="ignore"):
        array = numbers.astype(dtype)
        wrong = ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(array.shape, bool)
        if numbers.dtype.kind != "f" or dtype == "int64":
            wrong |= array.astype(numbers.dtype) != numbers
            if numbers.dtype.kind == "u":
                wrong |= array < 0
    if wrong.any():
        raise DataError(
            f"{name} has {numbers[wrong.argmax()]}, which is no finite number of {dtype}: correct the file, or set "
            f"dataset.dtype={'int64' if dtype == 'float32' and numbers.dtype.kind in 'iu' else 'float32'}"
        )
    return array
