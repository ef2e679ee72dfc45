"""Paths of data sets on this machine, with errors that describe the missing files."""

from __future__ import annotations

from pathlib import Path

from paddle_dp.errors import DataError, UsageError


class MissingDataError(DataError, UsageError):
    """The data are missing at the recipe's path. Another setting would help, so this is also a UsageError."""


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
