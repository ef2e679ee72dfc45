"""The code of a training as checksums: of imported modules that belong to no library, of a script or the cells of a
notebook, and of the files of a recipe's parts."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paddle_dp.identity.walk import checksum, is_library
from paddle_dp.part import Part
from paddle_dp.part.call import Call
from paddle_dp.recipe import Recipe

MODULE_PREFIX = "code of module "
_MAX_FILE_BYTES = 2**28  # bytes; a larger file is not read for its checksum
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON_MODULES = {"sitecustomize", "usercustomize"}


def file_crc(file: str | None) -> str | None:
    """ "CRC-32 0a1b2c3d"; None if there is no file, or it is too large to read."""
    if file is None or not os.path.isfile(file) or os.path.getsize(file) > _MAX_FILE_BYTES:
        return None
    return checksum(Path(file).read_bytes())


def module_code() -> dict[str, str]:
    """{"code of module net": "CRC-32 0a1b2c3d"} for each imported file outside installed packages."""
    checksums, main = {}, sys.modules.get("__main__")
    for name in sorted(name for name in list(sys.modules) if not is_library(name)):
        module = sys.modules.get(name)
        file = str(getattr(module, "__file__", None))
        if module is main or name in _PYTHON_MODULES or not file.endswith(".py"):
            continue
        if _INSTALLED.isdisjoint(file.split(os.sep)) and (crc := _module_crc(file, os.path.getmtime(file))):
            checksums[f"{MODULE_PREFIX}{name}"] = crc
    return checksums


@cache
def _module_crc(file: str, changed: float) -> str | None:
    return file_crc(file)


def script_code() -> str | None:
    """The checksum of the script's file, or else of the functions and classes that a notebook's cells defined."""
    main = sys.modules.get("__main__")
    return file_crc(vars(main).get("__file__")) or _defined_in(main) if main else None


def _defined_in(module: ModuleType) -> str | None:
    """The checksum of the sources of a module's functions and methods; None without any."""
    members = [member for _, member in sorted(vars(module).items())]
    methods = [vars(kind)[name] for kind in members if isinstance(kind, type) for name in sorted(vars(kind))]
    sources = []
    for function in (*members, *methods):
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            with suppress(OSError):  # it was not made by a cell
                sources.append(inspect.getsource(function))
    return checksum("".join(sources)) if sources else None


def recipe_code(recipe: Recipe) -> dict[str, str]:
    """The checksum of each part's file, if it has one."""
    components = (
        recipe.model, *_datasets(recipe.dataset), recipe.loss, recipe.optimizer, recipe.schedule, recipe.strategy,
        *(component for turn in recipe.turns.values() for component in (turn.loss, turn.optimizer)),
    )  # fmt: skip
    return {f"code of {p.shelf} {p.name}": code for p in components if p is not None and (code := code_of(p))}


def _datasets(dataset: Part) -> Iterator[Part]:
    """Yields the data set, and each one of a mixture."""
    yield dataset
    for source in getattr(dataset.config, "sources", ()):
        if isinstance(nested := getattr(source, "dataset", None), Part):
            yield from _datasets(nested)


def code_of(component: Part) -> str | None:
    """The checksum of the part's source file; None for parts of this package and Paddle: their versions are facts."""
    config = type(component.config)
    kind: Any = config.called if issubclass(config, Call) else config
    if (kind.__module__ or "").partition(".")[0] in ("paddle_dp", "paddle"):
        return None
    try:
        return file_crc(inspect.getsourcefile(kind))
    except TypeError:
        return None


@cache
def package_crc() -> int:
    """The checksum of all files of this package: in a clone the version alone is not enough."""
    folder, crc = Path(__file__).parent.parent, 0
    for file in sorted(folder.rglob("*.py")):
        crc = zlib.crc32(file.read_bytes(), zlib.crc32(str(file.relative_to(folder)).encode(), crc))
    return crc
