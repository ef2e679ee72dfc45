"""Finds text files, and chooses the held-out ones by their names alone."""

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
"""A file, with its name relative to the folder that was given: equal on every machine."""

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_files(path: str | None) -> list[Named]:
    """The files of `path` (a folder, a file or a glob) in the order of their names; Python's own without a path."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _below(root, ".py", _NOT_SOURCE)
        if not files:
            raise MissingDataError(f"{root} holds no Python sources: name texts to read, dataset.path=…")
        return files
    if glob.has_magic(path):
        files = _matching(Path(path).expanduser())
    elif (file := given(path, "a folder of text files, a file, or a glob such as 'texts/**/*.md'")).is_file():
        files = [(file.name, file)]
    else:
        files = _below(file, "", set())
    if not files:
        raise MissingDataError(f"dataset.path: {path} holds no files")
    return files


def _below(root: Path, suffix: str, without: set[str]) -> list[Named]:
    """The files below `root` whose names end in `suffix`; hidden files and folders are left out."""
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in without and name[0] != "."]
        paths += [Path(folder, name) for name in names if name.endswith(suffix) and name[0] != "."]
    return _named(root, (path for path in paths if path.is_file()))


def _matching(pattern: Path) -> list[Named]:
    parts = pattern.parts
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    files = map(Path, glob.glob(str(pattern), recursive=True))
    return _named(Path(*parts[:fixed]), (file for file in files if file.is_file()))


def _named(root: Path, files: Iterable[Path]) -> list[Named]:
    return sorted((file.relative_to(root).as_posix(), file) for file in files)


def first_bytes(files: list[Named], limit: int) -> list[Named]:
    """The first files that together have at most `limit` bytes; the first that would exceed it ends the list."""
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
    """The names of ceil(fraction · files) files, but never of all: those with the smallest hashes.

    A file's hash does not depend on the other files, so a new file changes the split of few others.
    """
    number = min(math.ceil(fraction * len(files) - 1e-9), len(files) - 1)
    return set(sorted((name for name, _ in files), key=_hash)[:number])


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
