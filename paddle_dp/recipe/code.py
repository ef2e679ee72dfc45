"""The code that a run's parts are in, kept in the run's folder: the run can be evaluated where that code is not."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.part.shelf import CODE, folders, kept_code, shipped

_PACKAGE = Path(__file__).resolve().parent.parent


def keep(folder: Path) -> list[Path]:
    """Copies the source files that this process has imported from the working folder, and the models of the recipe that
    are not shipped, into `folder`/code; returns the copies. An earlier attempt's are replaced."""
    # Read first: a resumed run may have imported its own copies.
    copies = {folder / CODE / place: file.read_bytes() for place, file in _own()}
    shutil.rmtree(folder / CODE, ignore_errors=True)
    for copy, content in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    return sorted(copies)


def changed(recipe: Path) -> list[tuple[Path, Path]]:
    """(file, copy) of the code beside a recipe that is another one where Python finds it first. Imports nothing."""
    kept = kept_code(recipe)
    if kept is None:
        return []
    roots = [Path.cwd(), *(Path(place) for place in sys.path if place)]
    found = []
    for copy in sorted(kept.rglob("*.py")):
        place = copy.relative_to(kept)
        shelf = place.parts[0] == "models"
        places = (
            [f / Path(*place.parts[1:]) for f in folders("models", recipe)]
            if shelf
            else [r / place for r in roots]
        )
        file = next((file for file in places if file.is_file()), copy)
        if file.read_bytes() != copy.read_bytes():
            found.append((file, copy))
    return found


def _own() -> Iterator[tuple[Path, Path]]:
    """(place, file) of each module that is neither installed nor this package's; its place: below the folder that
    Python found it in."""
    kept = [Path(place) for place in sys.path if Path(place).name == CODE]
    here, ours = Path.cwd().resolve(), [_PACKAGE, *filter(None, [shipped("models")])]
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if not isinstance(where, str) or not where.endswith(".py") or name == "__main__":
            continue
        file = Path(where).resolve()
        if "site-packages" in file.parts or any(file.is_relative_to(own) for own in ours):
            continue
        words = name.split(".")
        place = Path(*words, "__init__.py") if file.name == "__init__.py" else Path(*words).with_suffix(".py")
        if words[0] == "models" or any(file == (root / place).resolve() for root in (here, *kept)):
            yield place, file
