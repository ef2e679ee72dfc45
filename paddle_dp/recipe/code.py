"""The code that a run's parts are in, kept in the run's folder: the run can be evaluated where that code is not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.part.shelf import CODE, copied_code, folders, shipped

_PACKAGE = Path(__file__).resolve().parent.parent


def keep(folder: Path) -> list[Path]:
    """Copies the source files that this process has imported from the working folder, and the models of the recipe that
    are not shipped, into `folder`/code; returns the copies. An earlier attempt's are replaced."""
    # Read first: a resumed run may have imported its own copies.
    copies = {folder / CODE / relative_path: file.read_bytes() for relative_path, file in _user_modules()}
    shutil.rmtree(folder / CODE, ignore_errors=True)
    for copy, content in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return sorted(copies)


def changed(recipe: Path) -> list[tuple[Path, Path]]:
    """(file, copy) of the code beside a recipe that is another one where Python finds it first. Imports nothing."""
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
    """(place, file) of each module that is neither installed nor this package's; its place: below the folder that
    Python found it in."""
    copy_folders = [Path(relative_path) for relative_path in sys.path if Path(relative_path).name == CODE]
    here, ours = Path.cwd().resolve(), [_PACKAGE, *filter(None, [shipped("models")])]
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if not isinstance(where, str) or not where.endswith(".py") or name == "__main__":
            continue
        file = Path(where).resolve()
        if "site-packages" in file.parts or any(file.is_relative_to(own) for own in ours):
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
