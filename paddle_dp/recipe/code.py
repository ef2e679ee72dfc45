"""Copies the code of a run's parts into the run's folder, so that the run can be evaluated without the original."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.part.shelf import CODE, copied_code, folders, shipped

_PACKAGE = Path(__file__).resolve().parent.parent


def keep(folder: Path) -> list[Path]:
    """Copies the source files that this process has imported from the working folder, and the recipe's models that are
    not shipped, into `folder`/code. Returns the copies. They replace an earlier attempt's."""
    # All files are read before the folder is removed: a resumed run may have imported these copies.
    copies = {folder / CODE / relative_path: file.read_bytes() for relative_path, file in _user_modules()}
    shutil.rmtree(folder / CODE, ignore_errors=True)
    for copy, content in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return sorted(copies)


def changed(recipe: Path) -> list[tuple[Path, Path]]:
    """The files that differ from their copies next to a recipe, as (file, copy). Imports nothing."""
    copies = copied_code(recipe)
    if copies is None:
        return []
    roots = [Path.cwd(), *(Path(relative_path) for relative_path in sys.path if relative_path)]
    changed_files = []
    for copy in sorted(copies.rglob("*.py")):
        relative_path = copy.relative_to(copies)
        shelf = relative_path.parts[0] == "models"
        candidates = (
            [f / Path(*relative_path.parts[1:]) for f in folders("models", recipe)]
            if shelf
            else [r / relative_path for r in roots]
        )
        file = next((file for file in candidates if file.is_file()), copy)
        if file.read_bytes() != copy.read_bytes():
            changed_files.append((file, copy))
    return changed_files


def _user_modules() -> Iterator[tuple[Path, Path]]:
    """Yields (relative path, file) of each module that is neither installed nor part of this package. The path is
    relative to the folder in which Python found it."""
    copy_folders = [Path(relative_path) for relative_path in sys.path if Path(relative_path).name == CODE]
    here, ours = Path.cwd().resolve(), [_PACKAGE, *filter(None, [shipped("models")])]
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if not isinstance(where, str) or not where.endswith(".py") or name == "__main__":
            continue
        file = Path(where).resolve()
        if "site-packages" in file.parts or any(file.is_relative_to(root) for root in ours):
            continue
        segments = name.split(".")
        relative_path = (
            Path(*segments, "__init__.py")
            if file.name == "__init__.py"
            else Path(*segments).with_suffix(".py")
        )
        if segments[0] == "models" or any(
            file == (root / relative_path).resolve() for root in (here, *copy_folders)
        ):
            yield relative_path, file
