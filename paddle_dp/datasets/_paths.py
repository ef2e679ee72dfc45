"""Where a data set that is not shipped lies on this machine, and what to say when it does not lie there."""

from __future__ import annotations

from pathlib import Path

from paddle_dp.errors import DataError, UsageError


class MissingDataError(DataError, UsageError):
    """The data are not where the recipe says: another setting mends it."""


def given(path: str | None, what: str, setting: str = "path") -> Path:
    """`path` as a path that exists; a MissingDataError that says what `setting` has to be, when it does not."""
    if path is None:
        raise MissingDataError(
            f"dataset.{setting} is not given: it is to be {what} (dataset.{setting}=/where/it/lies)"
        )
    found = Path(path).expanduser()
    if not found.exists():
        raise MissingDataError(f"dataset.{setting}: {found} does not exist; it is to be {what}")
    return found


def inside(folder: Path, names: tuple[str, ...], what: str) -> Path:
    """The first of `names` that exists in `folder`; a MissingDataError that says what was looked for otherwise."""
    for name in names:
        if (folder / name).exists():
            return folder / name
    there = sorted(entry.name for entry in folder.iterdir())[:8] if folder.is_dir() else []
    has = f"has {', '.join(there)}" if there else "is empty" if folder.is_dir() else "is no folder"
    raise MissingDataError(f"dataset.path: {folder} has no {' or '.join(names)}, {what}; it {has}")
