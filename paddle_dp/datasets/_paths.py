"""What data sets need on this machine, paths and packages, with errors that describe what is missing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_dp.errors import DataError, InstallError, UsageError


class MissingDataError(DataError, UsageError):
    """The data are missing at the recipe's path. Another setting would help, so this is also a UsageError."""


def needed_module(name: str, error: str) -> Any:
    """A module of an optional package. Raises InstallError, with the text `error`, without it."""
    try:
        return import_module(name)
    except ImportError:
        raise InstallError(error) from None


def existing_path(path: str | None, description: str, setting: str = "path") -> Path:
    """`path` as an existing Path. Raises MissingDataError, which describes the value that `setting` needs."""
    if path is None:
        raise MissingDataError(
            f"dataset.{setting} is not given: give {description} (dataset.{setting}=/where/it/is)"
        )
    existing = Path(path).expanduser()
    if not existing.exists():
        raise MissingDataError(f"dataset.{setting}: {existing} does not exist; give {description}")
    return existing


def inside(folder: Path, names: tuple[str, ...], description: str) -> Path:
    """The first of `names` that exists in `folder`. Raises MissingDataError that lists the names and the folder."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    there = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
    has = f"has {', '.join(there)}" if there else "is empty" if folder.is_dir() else "is not a folder"
    raise MissingDataError(f"dataset.path: {folder} has no {' or '.join(names)}, {description}; it {has}")


def files_of(root: Path, pattern: str, setting: str, example: str) -> list[Path]:
    """The files of a pattern in `root`, sorted, or of a range, `a-{00..12}.b`, in its order. Raises MissingDataError
    for none, and for one of a range that does not exist; `example`: a pattern of such files."""
    ranges = re.findall(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not ranges:
        anchor = Path(pattern).anchor  # "/" of an absolute one, else ""
        files = sorted((root / anchor).glob(pattern.removeprefix(anchor)))
    else:
        numbers = [[str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)] for low, high in ranges]
        pieces = re.split(r"\{\d+\.\.\d+\}", pattern)
        files = [
            root / "".join(itertools.chain(*zip(pieces, [*chosen, ""], strict=True)))
            for chosen in itertools.product(*numbers)
        ]
    files = files or [root / pattern]
    if (absent := next((file for file in files if not file.is_file()), None)) is not None:
        folder = absent.parent if absent.parent.is_dir() else root
        there = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
        has = f"{folder} has {', '.join(there) or 'nothing'}"
        raise MissingDataError(
            f"dataset.{setting}: {absent} does not exist; {has}. Give the pattern of the files, "
            f"such as dataset.{setting}='{example}'"
        )
    return files


def refuse_test_files(files: Sequence[Path], root: Path, test: str) -> None:
    """Raises MissingDataError for a file to train on that the pattern `test` has, too, unless it has just all of them:
    then it is meant."""
    held_out: list[Path] = []
    with suppress(MissingDataError, ValueError, IndexError):  # only the test split needs its files
        held_out = files_of(root, test, "test", "")
    if {file.resolve() for file in held_out} != {file.resolve() for file in files}:
        refuse_learned(held_out, files, "train", "by another pattern")


def refuse_learned(held_out: Iterable[Path], learned: Iterable[Path], setting: str, remedy: str) -> None:
    """Raises MissingDataError for a file of dataset.test that is one of dataset.`setting`, too."""
    files = {file.resolve(): file for file in held_out}
    if both := files.keys() & {file.resolve() for file in learned}:
        raise MissingDataError(
            f"dataset.test: {files[min(both)]} is one of the files of dataset.{setting}, too, and would be learned: "
            f"leave it out there {remedy}."
        )


def file_state(stat: os.stat_result) -> tuple[int, int]:
    """Size and time of change: another state of a file has another one."""
    return stat.st_size, stat.st_mtime_ns


def states_of(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What an index of the files depends on: their paths and states."""
    return [(str(file.resolve()), *file_state(file.stat())) for file in files]
