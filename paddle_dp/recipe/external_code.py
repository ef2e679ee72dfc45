"""Finds the modules outside this package that hold a recipe's parts, because importing them runs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paddle_dp.part.shelf import copied_code, folders, shipped

OUR_PACKAGES = ("paddle_dp", "paddle")


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
        return None if first in (*OUR_PACKAGES, *sys.stdlib_module_names) else _file_of(use, home)
    files = (_file(folder / use) for folder in folders("models", home) if is_model)
    file = next((file for file in files if file is not None), None)
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
        step = next((root / name for root in inside if (root / name).is_dir() or _file(root / name)), None)
        if step is None:
            break
        file, inside = _file(step) or file, [step]
    return use if file is None else _shown(file)


def _file(stem: Path) -> Path | None:
    """The module `stem`: a file, or the __init__.py of a folder."""
    options = (stem / "__init__.py", stem.parent / f"{stem.name}.py")
    return next((option for option in options if os.path.isfile(option)), None)


def _shown(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
