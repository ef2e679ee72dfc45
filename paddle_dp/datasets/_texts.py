"""Which text files there are, and which of them are held out: decided by their names alone."""

from __future__ import annotations

import glob
import hashlib
import math
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from paddle_dp.datasets._paths import MissingDataError, given

Named = tuple[str, Path]
"""A file, under its name relative to the folder that was asked for: the same on every machine."""

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_files(path: str | None) -> list[Named]:
    """The files of `path` (a folder, a file or a glob) in the order of their names; Python's own without a path."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        found = _below(root, ".py", _NOT_SOURCE)
        if not found:
            raise MissingDataError(f"{root} holds no Python sources; say which texts to read: dataset.path=…")
        return found
    if glob.has_magic(path):
        found = _matching(Path(path).expanduser())
    elif (file := given(path, "a folder of text files, a file, or a glob such as 'texts/**/*.md'")).is_file():
        found = [(file.name, file)]
    else:
        found = _below(file, "", set())
    if not found:
        raise MissingDataError(f"dataset.path: {path} holds no files")
    return found


def _below(root: Path, suffix: str, without: set[str]) -> list[Named]:
    """The files below `root` whose names end in `suffix`; hidden files and folders are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and name[0] != "."]
    return _named(root, (file for file in found if file.is_file()))


def _matching(pattern: Path) -> list[Named]:
    parts = pattern.parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    files = map(Path, glob.glob(str(pattern), recursive=True))
    return _named(Path(*parts[:fixed]), (file for file in files if file.is_file()))


def _named(root: Path, files: Iterable[Path]) -> list[Named]:
    return sorted((file.relative_to(root).as_posix(), file) for file in files)


def first_bytes(files: list[Named], limit: int) -> list[Named]:
    """The first of `files` that have `limit` bytes together; the one that would pass it and all after it stay out."""
    total, kept = 0, []
    for name, file in files:
        total += file.stat().st_size
        if total > limit:
            break
        kept.append((name, file))
    if not kept:
        raise MissingDataError(f"dataset.limit: the first file, {files[0][1]}, is larger than that")
    return kept


def held_out(files: list[Named], fraction: float) -> set[str]:
    """The names of ceil(fraction · files) files, but not of all: those whose hashes come first.

    Every text keeps its lot whatever else is in the folder, so that a new file moves at most few others.
    """
    number = min(math.ceil(fraction * len(files) - 1e-9), len(files) - 1)
    return set(sorted((name for name, _ in files), key=_lot)[:number])


def _lot(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
