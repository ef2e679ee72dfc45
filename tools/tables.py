"""The printer of the tools' tables: lines of markdown, and rows as a file of CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

Row = TypeVar("Row")


def table_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table_head(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{table_row(names)}\n{'|---' * len(names)}|"


def table(names: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([table_head(names), *map(table_row, rows)])


def write_csv(rows: Sequence[Any], file: Path, *properties: str) -> None:
    """Writes dataclasses of one kind, a line each below the names of their fields and of these properties."""
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([*asdict(rows[0]), *properties])
        writer.writerows(
            [*asdict(row).values(), *(getattr(row, name) for name in properties)] for row in rows
        )


def read_csv(kind: type[Row], *files: Path) -> list[Row]:
    """The rows that `write_csv` wrote of a dataclass's fields; an empty cell is None."""
    types = {name: (get_args(hint) or [hint])[0] for name, hint in get_type_hints(kind).items()}
    lines = [line for file in files for line in csv.DictReader(file.open())]
    return [
        kind(**{name: types[name](cell) if cell else None for name, cell in line.items()}) for line in lines
    ]
