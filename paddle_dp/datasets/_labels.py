"""The names of classes by their numbers, and the form of labels in files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._paths import existing_path
from paddle_dp.errors import DataError
from paddle_dp.text import and_more

MOST_CLASSES = 1_000_000  # a larger number is a date or an identifier


def refuse_unknown(labels: Array, learned: Array, test: Path, train: Path) -> None:
    """Raises DataError for held-out labels (of `test`) that no training sample (of `train`) has."""
    if unknown := np.setdiff1d(labels, learned).tolist():
        which = ", ".join(map(str, unknown[:8])) + and_more(unknown, 8)
        raise DataError(f"{test} has classes that {train} has no image of: {which}")


def class_names(root: Path, names: str | None, count: int) -> tuple[str, ...]:
    """The names of `count` classes or more: of the file `names` in `root`; without one, the numbers."""
    if names is None:
        return tuple(map(str, range(count)))
    path = existing_path(str(root / names), "the file with the classes' names", "names")
    named = [line for _, line in lines(path)]
    numbered = [re.fullmatch(r"(\d+)\s+(.+)", line) for line in named]
    if named and all(numbered):
        by_number = {int(match[1]): match[2] for match in numbered if match}
        if sorted(by_number) != list(range(len(named))):
            raise DataError(f"{path} numbers its classes, and not each from 0 to {len(named) - 1} once")
        named = [by_number[number] for number in range(len(named))]
    if len(named) < count:
        raise DataError(f"{path} names {len(named)} classes, and the labels have {count}")
    return tuple(named)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text that are not empty, stripped, with their numbers from 1."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line := line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a text: {error}") from error
