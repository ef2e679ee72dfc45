"""The printer of the tools' tables: lines of markdown, and rows as a file of CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any


def table_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table_head(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{table_row(names)}\n{'|---' * len(names)}|"


def table(names: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    return "\n".join([table_head(names), *map(table_row, rows)])


def write_csv(rows: Sequence[Any], file: Path) -> None:
    """Writes dataclasses of one kind, a line each below the names of their fields."""
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))
