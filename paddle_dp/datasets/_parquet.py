"""Parquet files by pyarrow: their columns, and rows as records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_dp.datasets._paths import MissingDataError, needed_module
from paddle_dp.errors import DataError

SUFFIX = ".parquet"
_ROWS = 1024  # that are Python objects at a time


def is_parquet(file: Path) -> bool:
    return file.suffix.lower() == SUFFIX


def pyarrow_parquet(file: Path) -> Any:
    """The module pyarrow.parquet. Raises InstallError, which names the file that needs it."""
    error = f"dataset.path: reading {file} needs the package pyarrow: pip install 'paddle_dp[parquet]'"
    return needed_module("pyarrow.parquet", error)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raises DataError with the name of what cannot be read."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # pyarrow has an error class for each kind of damage
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def opened(file: Path) -> Any:
    """The `pyarrow.parquet.ParquetFile`. Raises InstallError without pyarrow, DataError for a damaged file."""
    parquet = pyarrow_parquet(file)
    try:
        return parquet.ParquetFile(file)
    except Exception as error:  # pyarrow has an error class for each kind of damage
        raise DataError(
            f"{file} cannot be read as a Parquet file: {type(error).__name__}: {error}. It may be cut off, or still "
            "being written"
        ) from error


def require_columns(file: Path, table: Any, columns: Sequence[str], setting: str) -> None:
    """Raises MissingDataError for a column that an opened file lacks. `setting`: the one that names it, "field"."""
    there: list[str] = table.schema_arrow.names
    if lacking := [column for column in columns if column not in there]:
        raise MissingDataError(
            f"{file} has no column '{lacking[0]}'; it has {', '.join(there) or 'none'}. Name the one that is meant: "
            f"dataset.{setting}=…"
        )


def records(
    file: Path, column: str, span: tuple[float, float], further: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a part of a file, with their numbers from 1, in batches of bounded memory: `column`, and
    every column of `further` that the file has. Values that are null are left out.

    Raises MissingDataError without the column, DataError for a damaged file.
    """
    table = opened(file)
    require_columns(file, table, [column], "field")
    names = [column, *(name for name in further if name in table.schema_arrow.names)]
    count = table.metadata.num_rows
    start, stop = (round(share * count) for share in span)
    number = 0
    for group in range(table.metadata.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if number + rows <= start or number >= stop:
            number += rows
            continue
        with reading(f"{file}: row group {group}"):
            for batch in table.iter_batches(_ROWS, row_groups=[group], columns=names, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    if start < number <= stop:
                        yield number, _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """A row as the line of a .jsonl file has it: a struct's field that is null is absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value
