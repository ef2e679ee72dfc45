"""What an object was made with, as JSON values by name: numbers, texts, lists, arrays, and functions by their kind."""

from __future__ import annotations

import dis
import inspect
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.optimizer.lr import LRScheduler

_PATHS = {"path", "folder", "dir", "directory", "file", "filename", "name", "root", "cache"}
_DEVICES = {"device", "place", "host"}
_GENERATED = re.compile(r"\w+_\d+(\.\w+)*")  # Paddle's names of layers and parameters, which count up
_DEPTH = 3  # objects within objects that are looked into
_LARGEST = 2**28  # bytes of an array that is worth reading to compare it
_MOST = 1000  # characters of a list that are kept as they are
_NOTHING = object()


def kind_of(thing: Any) -> str:
    """«paddle.nn.layer.common.Linear»; a function's own name."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def settings_of(thing: Any, depth: int = _DEPTH) -> dict[str, Any]:
    """What an object was made with: its attributes, with its class's own defaults; of a function its closure, its
    defaults and the globals that it reads; of a partial the arguments; of a method its object's settings, too.

    Paths, devices and this rank's number may differ, and are left out.
    """
    if isinstance(thing, type):
        return {}
    if isinstance(thing, partial):
        given = {f"argument {n}": value for n, value in enumerate(thing.args)}
        return {**settings_of(thing.func, depth), **described({**given, **thing.keywords}, depth)}
    if inspect.ismethod(thing):
        return {**settings_of(thing.__self__, depth), **settings_of(thing.__func__, depth)}
    if inspect.isfunction(thing):
        return described({**_globals(thing), **_closed(thing), **_defaults(thing)}, depth)
    found = described({**_class_settings(type(thing)), **_attributes(thing)}, depth)
    call = getattr(type(thing), "forward" if isinstance(thing, nn.Layer) else "__call__", None)
    return {**described(_globals(call), depth), **found} if inspect.isfunction(call) else found


def tensors_of(layer: nn.Layer) -> dict[str, Any]:
    """The buffers of a layer, and its parameters that nobody trains, by their shapes, types and checksums."""
    frozen = {name: p for name, p in layer._parameters.items() if p is not None and p.stop_gradient}
    return described({**frozen, **layer._buffers})


def described(values: Mapping[str, Any], depth: int = _DEPTH) -> dict[str, Any]:
    """Those of `values` that can be compared, as JSON; functions and schedules among them with their own settings."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or may_differ(name, value):
            continue
        if (plain := _plain(value)) is not _NOTHING:
            found[name] = plain
        elif depth and _is_looked_into(value):
            found[name] = kind_of(value)
            inner = settings_of(value, depth - 1)
            inner |= tensors_of(value) if isinstance(value, nn.Layer) else {}
            found |= {f"{name}.{word}": within for word, within in inner.items()}
    return found


def may_differ(name: str, value: Any) -> bool:
    """Whether a setting says where something is or runs, or which rank this is."""
    words = name.lower().strip("_").split("_")
    if isinstance(value, str):
        if _DEVICES & {*words} or ("name" in words and _GENERATED.fullmatch(value)):
            return True
        return bool(_PATHS & {*words}) and os.sep in value
    return name == "training" or (words[-1] == "rank" and type(value) is int)


def _plain(value: Any) -> Any:
    """A JSON value that is the same for the same numbers and words; _NOTHING where there is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        finite = not isinstance(value, float) or math.isfinite(value)  # a checkpoint's JSON has no others
        return value if finite and not isinstance(value, Enum) else str(value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, (np.ndarray, paddle.Tensor)):
        return _array(value)
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        inner: Any = [_plain(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in inner) else _short(inner)
    if isinstance(value, Mapping):
        inner = {str(key): _plain(item) for key, item in value.items()}
        return _NOTHING if any(item is _NOTHING for item in inner.values()) else _short(inner)
    return _NOTHING


def _short(values: Any) -> Any:
    text = json.dumps(values, default=str)
    return values if len(text) <= _MOST else f"CRC-32 {zlib.crc32(text.encode()):08x} of {len(values)} values"


def _array(value: Any) -> Any:
    """«float32[2], CRC-32 0a1b2c3d»."""
    if isinstance(value, paddle.Tensor):
        if not value._is_initialized():
            return _NOTHING
        dtype, size = str(value.dtype).rpartition(".")[2], value.numel().item() * value.element_size()
    else:
        dtype, size = str(value.dtype), value.nbytes
        if value.dtype.hasobject:
            return _NOTHING
    kind = f"{dtype}{list(value.shape)}"
    if size > _LARGEST:
        return kind
    content = np.ascontiguousarray(value.numpy() if isinstance(value, paddle.Tensor) else value)
    return f"{kind}, CRC-32 {zlib.crc32(content.tobytes()):08x}"


def _is_looked_into(value: Any) -> bool:
    """Functions, schedules, and layers that learn nothing, such as the loss that a function calls."""
    if isinstance(value, nn.Layer):
        return all(p.stop_gradient for p in value.parameters())
    if isinstance(value, FunctionType):
        return not kind_of(value).startswith("paddle_dp.")
    return isinstance(value, (partial, LRScheduler))


def _attributes(thing: Any) -> dict[str, Any]:
    """An object's own. A layer's private ones count (ELU keeps `_alpha`), without those that every layer has."""
    own = getattr(thing, "__dict__", {})
    if isinstance(thing, nn.Layer):
        return {name: value for name, value in own.items() if name not in _of_every_layer()}
    return {name: value for name, value in own.items() if not name.startswith("_")}


@cache
def _of_every_layer() -> frozenset[str]:
    return frozenset(vars(nn.Layer()))


def _class_settings(kind: type) -> dict[str, Any]:
    """What stands in the classes themselves: an attribute that has its class's value is nothing new."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not _is_library(base.__module__):
            plain = {name: v for name, v in vars(base).items() if not name.startswith("__")}
            found |= {name: v for name, v in plain.items() if _plain(v) is not _NOTHING}
    return found


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def _closed(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _globals(function: FunctionType) -> dict[str, Any]:
    """The globals that a function of nobody's library reads and does not set."""
    if _is_library(function.__module__):
        return {}
    codes, read, written = [function.__code__], set(), set()
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL":
                read.add(instruction.argval)
            elif instruction.opname == "STORE_GLOBAL":
                written.add(instruction.argval)
    known = function.__globals__
    found = {name: known[name] for name in sorted(read - written) if name in known}
    return {
        name: value
        for name, value in found.items()
        if not (isinstance(value, FunctionType) and _is_library(value.__module__))
    }


def _is_library(module: str | None) -> bool:
    """Whether code comes from where a version says what it is."""
    top = (module or "").partition(".")[0]
    return top in ("paddle", "paddle_dp", "numpy") or (top in sys.stdlib_module_names and top != "__main__")
