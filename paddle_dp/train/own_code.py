"""Checksums of the code that belongs to no library: of modules that were imported, and of a notebook's cells."""

from __future__ import annotations

import os
import sys
import zlib
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from paddle_dp.parallel.own_code import is_library

OF_MODULE = "code of module "
_LARGEST = 2**28  # bytes; a larger file is not read for its checksum
_INSTALLED = {"site-packages", "dist-packages"}
_OF_PYTHON = {"sitecustomize", "usercustomize"}


def file_crc(file: str | None) -> str | None:
    """«CRC-32 0a1b2c3d»; None for no file, or one that is too large to read for it."""
    if file is None or not os.path.isfile(file) or os.path.getsize(file) > _LARGEST:
        return None
    return f"CRC-32 {zlib.crc32(Path(file).read_bytes()):08x}"


def module_code() -> dict[str, str]:
    """{"code of module net": "CRC-32 0a1b2c3d"}: of each file that was imported and is not installed."""
    found, main = {}, sys.modules.get("__main__")
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            module is main
            or name in _OF_PYTHON
            or is_library(name)
            or not isinstance(file, str)
            or not file.endswith(".py")
        ):
            continue
        if not _INSTALLED & {*Path(file).parts} and (crc := _module_crc(file, os.path.getmtime(file))):
            found[f"{OF_MODULE}{name}"] = crc
    return found


@cache
def _module_crc(file: str, changed: float) -> str | None:
    return file_crc(file)


def script_code() -> str | None:
    """Of the script's file; where there is none, of the functions and classes that a notebook's cells defined."""
    main = sys.modules.get("__main__")
    return file_crc(vars(main).get("__file__")) or _defined_in(main) if main else None


def _defined_in(module: ModuleType) -> str | None:
    crc, found = 0, False
    for name, value in sorted(vars(module).items()):
        for function in _functions(value, module.__name__):
            crc, found = zlib.crc32(_text(function.__code__).encode(), zlib.crc32(name.encode(), crc)), True
    return f"CRC-32 {crc:08x}" if found else None


def _functions(value: Any, module: str) -> list[FunctionType]:
    """A function of this module, or the methods of a class of it, in the order of their names."""
    if getattr(value, "__module__", None) != module:
        return []
    if isinstance(value, FunctionType):
        return [value]
    methods = [vars(value)[name] for name in sorted(vars(value))] if isinstance(value, type) else []
    return [method for method in methods if isinstance(method, FunctionType)]


def _text(code: CodeType) -> str:
    """What it does, and not where it stands."""
    constants = [_text(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _constant(value: Any) -> str:
    return repr(sorted(value, key=repr)) if isinstance(value, frozenset) else repr(value)
