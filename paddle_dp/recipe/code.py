"""The code outside this package that a recipe names: which modules it imports, and their copies in the run's folder.

Importing a module runs it, so its file is found without an import. By the copies, a run can be evaluated without the
original.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.part.shelf import CODE, PACKAGE, copied_code, folders, module_file, shipped
from paddle_dp.recipe.folder import COMMAND, has_run

LISTED = ".copies"  # in the folder of the copies: their names
OURPACKAGES = ("paddle_dp", "paddle")


def modules(values: Any, home: Path) -> list[str]:
    """The files of the modules that hold the parts in a recipe's `values`, each once, without importing any; a module's
    dotted name if there is no such file. `home` is the recipe's file."""
    names = (_module(use, is_model, home) for use, is_model in _uses(values, ()))
    return list(dict.fromkeys(name for name in names if name))


def _uses(values: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, bool]]:
    """Yields every `use` in the values, with True if it may name a file of the shelf models."""
    if isinstance(values, list):
        for number, value in enumerate(values):
            yield from _uses(value, (*path, number))
    if isinstance(values, dict):
        if isinstance(use := values.get("use"), str):
            yield use, path == ("model",)
        for key, value in values.items():
            yield from _uses(value, (*path, key))


def _module(use: str, is_model: bool, home: Path) -> str | None:
    if "." in use:
        first = use.partition(".")[0]
        return None if first in (*OURPACKAGES, *sys.stdlib_module_names) else _file_of(use, home)
    files = (module_file(folder / use) for folder in folders("models", home) if is_model)
    file = next(filter(None, files), None)
    root = shipped("models")
    return None if file is None or (root is not None and file.is_relative_to(root)) else _shown(file)


def _file_of(use: str, home: Path) -> str:
    """The file of the longest module in a dotted name, found without importing its packages."""
    first, *rest = use.split(".")
    last = [os.getcwd(), *map(str, filter(None, [copied_code(home)]))]  # searched last
    try:
        spec = find_spec(first) or PathFinder.find_spec(first, last)
    except ValueError:  # a module without a spec, such as __main__
        spec = None
    if spec is None:
        return use
    file = Path(spec.origin) if spec.origin else None
    inside = [Path(root) for root in spec.submodule_search_locations or ()]
    for name in rest:
        paths = (root / name for root in inside)
        step = next((path for path in paths if path.is_dir() or module_file(path)), None)
        if step is None:
            break
        file, inside = module_file(step) or file, [step]
    return use if file is None else _shown(file)


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


def check_copies(folder: Path, resume: str | None) -> None:
    """Raises UsageError if `folder`/code is the user's: `keep` would replace its modules. A run's has one of the files
    that a recipe's run writes before; an older run's moves aside, unless the run goes on by `resume`."""
    copies, recipe = folder / CODE, folder / "recipe.yaml"
    if not copies.exists() or (has_run(folder) and not resume):
        return
    is_run = recipe.is_file() and recipe.read_bytes().startswith(b"# Resolved:")
    if copies.is_symlink() or not (is_run or (folder / "inputs.json").is_file()):
        raise UsageError(
            f"{copies} is not from a run, and a run keeps copies of its modules in a folder of that name. Rename it, "
            f"or choose another folder for the run with {COMMAND[1]}."
        )


def keep(folder: Path) -> list[Path]:
    """Copies the source files that this process has imported from the working folder, and the recipe's models that are
    not shipped, into `folder`/code, which `check_copies` has passed. Returns the copies. They replace an earlier
    attempt's; other files there are the user's."""
    # All files are read before any is removed: a resumed run may have imported these copies.
    root, listed = folder / CODE, folder / CODE / LISTED
    earlier = listed.read_text("utf-8").splitlines() if listed.is_file() else []
    modules = {relative_path.as_posix(): file for relative_path, file in _user_modules()}
    copies = {
        name: file.read_bytes()
        for name, file in modules.items()
        if name in earlier or not file.is_relative_to(root.resolve())
    }
    for file in root.rglob("*.py"):
        if file.relative_to(root).as_posix() in earlier:
            file.unlink()
    for name, content in copies.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    if copies or earlier:
        listed.write_text("".join(f"{name}\n" for name in sorted(copies)), "utf-8")
    return sorted(root / name for name in copies)


def changed(recipe: Path) -> list[tuple[Path, Path]]:
    """The files that differ from their copies next to a recipe, as (file, copy). Imports nothing."""
    copies = copied_code(recipe)
    if copies is None:
        return []
    roots = [Path.cwd(), *(Path(relative_path) for relative_path in sys.path if relative_path)]
    changed_files = []
    for copy in sorted(copies.rglob("*.py")):
        relative_path, among = copy.relative_to(copies), roots
        if relative_path.parts[0] == "models":
            relative_path, among = Path(*relative_path.parts[1:]), folders("models", recipe)
        file = next(filter(Path.is_file, (root / relative_path for root in among)), copy)
        if file.read_bytes() != copy.read_bytes():
            changed_files.append((file, copy))
    return changed_files


def _user_modules() -> Iterator[tuple[Path, Path]]:
    """Yields (relative path, file) of each module that is neither installed nor part of this package. The path is
    relative to the folder in which Python found it."""
    copy_folders = [Path(relative_path) for relative_path in sys.path if Path(relative_path).name == CODE]
    here, ours = Path.cwd().resolve(), [PACKAGE, *filter(None, [shipped("models")])]
    library_folders: dict[str, bool] = {}

    def is_library(path: Path) -> bool:
        return "site-packages" in path.parts or any(path.is_relative_to(root) for root in ours)

    for name, imported in list(sys.modules.items()):
        source = getattr(imported, "__file__", None)
        if not isinstance(source, str) or not source.endswith(".py") or name == "__main__":
            continue
        parent = os.path.dirname(source)
        if parent not in library_folders:  # a few hundred, for thousands of modules
            library_folders[parent] = is_library(Path(parent).resolve())
        if library_folders[parent] and not os.path.islink(source):
            continue
        file = Path(source).resolve()
        if is_library(file):
            continue
        segments = name.split(".")
        module = [*segments, "__init__"] if file.name == "__init__.py" else segments
        relative_path = Path(*module).with_suffix(".py")
        candidates = ((root / relative_path).resolve() for root in (here, *copy_folders))
        if segments[0] == "models" or file in candidates:
            yield relative_path, file
