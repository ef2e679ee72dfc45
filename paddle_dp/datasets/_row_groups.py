"""Samples in the row groups of Parquet files: an index that is made once, groups that are kept up to an amount of
memory, and an order of epochs that needs no more.

A row group is read whole. So an epoch is read in windows: row groups in a random order, as many as half of the memory
holds, and their rows in a random order, before the next window.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from paddle_dp.datasets._arrays import Array, permutation
from paddle_dp.datasets._parquet import opened, pyarrow_parquet, reading, require_columns
from paddle_dp.datasets._paths import MissingDataError, file_state, states_of
from paddle_dp.datasets._windows import cached
from paddle_dp.errors import DataError
from paddle_dp.text import and_more
from paddle_dp.units import Bytes

_VERSION = 2  # of the index
_MOST_OPEN = 64  # files that a process keeps open
_ROW_DRAWS, _GROUP_DRAWS = 0x726F7773, 0x67727073  # rows, groups and the mixture's sources draw other numbers
_GROUP = np.dtype([("file", "<u4"), ("group", "<u4"), ("rows", "<i8"), ("bytes", "<i8")])
Group = TypeVar("Group")
ArrayTypes = Sequence[tuple[str, str | None]]  # column and dtype of each array; None: float32 or int64


def group_index(
    files: Sequence[Path], columns: dict[str, str], cache: str | None, arrays: ArrayTypes | None = None
) -> Array:
    """The row groups of the files in their order, without empty ones: `file`, `group`, `rows`, and the `bytes` of the
    arrays in memory; without `arrays`, of the columns when they are unpacked. `columns`: setting by column.

    It is kept in the folder `cache`, under a name of the files' paths, sizes and times of change. Raises DataError for
    a damaged file and MissingDataError for one without a column, or if there is no row.
    """
    pyarrow_parquet(files[0])
    sources = ("row groups", _VERSION, states_of(files), [*columns], arrays)
    return cached(cache, sources, lambda: (_index(files, columns, arrays),))[0]


def column_values(
    files: Sequence[Path], column: str, check: Callable[[Path, Any], Array], cache: str | None, name: str
) -> Array:
    """A small column of all files, such as labels, likewise kept in `cache`; `check` makes an array of a file's."""

    def make() -> tuple[Array]:
        return (np.concatenate([check(file, _column(file, column)) for file in files]),)

    return cached(cache, (name, _VERSION, states_of(files), column), make)[0]


def _column(file: Path, column: str) -> Any:
    with reading(f"{file}: column {column}"):
        return opened(file).read(columns=[column], use_threads=False).column(column)


def _index(files: Sequence[Path], columns: dict[str, str], arrays: ArrayTypes | None) -> Array:
    rows: list[tuple[int, int, int, int]] = []
    for number, file in enumerate(files):
        table = opened(file)
        for column, setting in columns.items():
            require_columns(file, table, [column], setting)
        for group in range(table.metadata.num_row_groups):
            described = table.metadata.row_group(group)
            chunks = [described.column(n) for n in range(described.num_columns)]
            if described.num_rows:
                size = sum(_bytes(chunk, columns, arrays) for chunk in chunks)
                rows.append((number, group, described.num_rows, size))
    if not rows:
        raise MissingDataError(f"{files[0]}{and_more(files)} hold no row")
    return np.array(rows, _GROUP)


def _bytes(chunk: Any, columns: Iterable[str], arrays: ArrayTypes | None) -> int:
    """The bytes in memory of a column, or a part of it, in a row group. Numbers that repeat take less in the file."""
    path = f"{chunk.path_in_schema}."
    if arrays is None:
        return int(chunk.total_uncompressed_size) if any(path.startswith(f"{c}.") for c in columns) else 0
    default = "int64" if chunk.physical_type in ("BOOLEAN", "INT32", "INT64") else "float32"
    dtypes = [dtype or default for column, dtype in arrays if path.startswith(f"{column}.")]
    return sum(int(chunk.num_values) * np.dtype(dtype).itemsize for dtype in dtypes)


class RowGroups(Generic[Group]):
    """The rows of files by number. `convert` makes what is kept of a group's table, and of the "file, row group n" that
    messages have.

    Each process keeps groups up to `memory` in all, and reads again what it has let go. Raises MissingDataError for a
    group that is larger.
    """

    def __init__(
        self,
        files: Sequence[Path],
        index: Array,
        columns: Sequence[str],
        memory: Bytes,
        convert: Callable[[Any, str], Group],
    ):
        self.files, self._index, self._columns, self._convert = [*files], index, [*columns], convert
        self._memory = memory
        self._states = [file_state(os.stat(file)) for file in files]
        self._ends = np.cumsum(index["rows"])
        self._begin()
        largest = index[np.argmax(index["bytes"])]
        if largest["bytes"] > memory.count:
            raise MissingDataError(
                f"dataset.memory: {self.files[largest['file']]} has a row group of {largest['rows']:,} rows and "
                f"{largest['bytes'] / 2**20:,.3g} MB in memory, and a process keeps {memory}: raise it, or write "
                "smaller groups, pyarrow.parquet.write_table(table, file, row_group_size=1000)"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def row(self, number: int) -> tuple[Group, int]:
        """The group that a row is in, and its number within."""
        group, within = self._position(number)
        return self._group(group), within

    def name_of(self, number: int) -> str:
        """Such as "train-000.parquet:17", the row counted from 1 in its file."""
        group, within = self._position(number)
        file = self._index["file"][group]
        before = self._index["rows"][:group][self._index["file"][:group] == file].sum()
        return f"{self.files[file]}:{within + before + 1}"

    def file_of(self, number: int) -> str:
        return str(self.files[self._index["file"][self._position(number)[0]]])

    def _position(self, number: int) -> tuple[int, int]:
        """The number of a row's group, and the row's number within."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        return group, number - int(self._ends[group] - self._index["rows"][group])

    def order(self, seed: int, epoch: int) -> Array:
        """The numbers of all rows in the order of an epoch, int64: groups and the rows of a window are permuted."""
        groups = permutation(len(self._index), seed % 2**64, epoch, _GROUP_DRAWS)
        window, used = 0, 0
        windows = np.empty(len(groups), np.int64)
        for group, size in zip(groups.tolist(), self._index["bytes"][groups].tolist(), strict=True):
            if used and used + size > self._memory.count // 2:
                window, used = window + 1, 0
            windows[group], used = window, used + size
        of_row = np.repeat(windows, self._index["rows"])
        drawn = permutation(len(of_row), seed % 2**64, epoch, _ROW_DRAWS)
        return drawn[np.argsort(of_row[drawn], kind="stable")]

    def _begin(self) -> None:
        self._process = os.getpid()
        self._open: OrderedDict[int, Any] = OrderedDict()
        self._groups: OrderedDict[int, tuple[Group, int]] = OrderedDict()
        self._used = 0

    def _group(self, group: int) -> Group:
        if self._process != os.getpid():
            self._begin()  # a fork has a copy of pyarrow's locks, in any state
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group][0]
        row = self._index[group]
        file, number = int(row["file"]), int(row["group"])
        name = f"{self.files[file]}, row group {number}"
        with reading(name):
            table = self._file(file).read_row_group(number, columns=self._columns, use_threads=False)
        converted = self._convert(table, name)
        # Images that repeat take less in the file.
        size = max(int(row["bytes"]), getattr(converted, "nbytes", 0))
        while self._groups and self._used + size > self._memory.count:
            self._used -= self._groups.popitem(last=False)[1][1]
        self._groups[group], self._used = (converted, size), self._used + size
        return converted

    def _file(self, number: int) -> Any:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        file = self.files[number]
        if file_state(os.stat(file)) != self._states[number]:
            raise DataError(f"{file} has changed after its index was made: start the training again")
        self._open[number] = opened(file)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return self._open[number]
