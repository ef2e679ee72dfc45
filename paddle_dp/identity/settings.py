"""An object's settings, as JSON values by name: numbers, texts, lists, arrays, and functions by their kind."""

from __future__ import annotations

import argparse
import dis
import gc
import inspect
import json
import math
import os
import re
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase as Parameter
from paddle.optimizer.lr import LRScheduler

from paddle_dp.identity.library_code import is_library

_PATHS = {"path", "folder", "dir", "directory", "file", "filename", "name", "root", "cache"}
_DEVICES = re.compile(
    r"(place\()?(undefined|cpu|[a-z]*gpu(_pinned)?|cuda|xpu|npu|mlu|dcu|custom\w*)(:\d+)?\)?"
)
# Words in names of settings that differ between processes: `local_rank`, `gpu_id`.
_NUMBERS, _PLACED = {"rank", "pid", "port"}, {"device", "gpu", "cuda"}
_AT = re.compile(r" at 0x[0-9a-f]+")  # in the repr of an object
_RANDOM_ID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}")  # uuid4
_EPOCH = 1.6e9  # seconds since 1970, in 2020: no setting is as large and has a fraction
_ADDRESS = "an object of this process"
_ENTRIES = 100  # a longer list or dict is not described entry by entry
_GENERATED = re.compile(r"\w+_\d+(\.\w+)*")  # Paddle's names of layers and parameters, which count up
_DEPTH = 3  # levels of objects within objects that are described
_MAX_ARRAY_BYTES = 2**28  # bytes of an array that is worth reading to compare it
_MAX_LIST_CHARS = 1000  # characters of a list that are kept as they are
_NOTHING = object()


def kind_of(thing: Any) -> str:
    """«paddle.nn.layer.common.Linear»; a function's own name."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


def settings_of(thing: Any, depth: int = _DEPTH, named: frozenset[str] | None = None) -> dict[str, Any]:
    """The settings of an object: its attributes, and its class's defaults; for a function its closure, its defaults and
    the globals that it reads; for a partial the arguments; for a method its object's settings, too. For a user's object
    inside another one, only the attributes that the holding code names (`named`), or the object's methods: a
    configuration may have many more.

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
        names, around = names_in(thing.__code__), {**_globals(thing), **_closed(thing)}
        read = {name: _entries_named(value, names) for name, value in around.items()}
        return described({**read, **_defaults(thing)}, depth, names)
    kind: Any = type(thing)
    attributes, names = {**_class_settings(kind), **_attributes(thing)}, _named_by(kind)
    if named is not None:
        names |= named
        attributes = {name: value for name, value in attributes.items() if name in names}
    settings = described(attributes, depth, names)
    call = getattr(type(thing), "forward" if isinstance(thing, nn.Layer) else "__call__", None)
    return {**described(_globals(call), depth), **settings} if inspect.isfunction(call) else settings


def tensors_of(layer: nn.Layer) -> dict[str, Any]:
    """The buffers and frozen parameters of a layer, by shape, dtype and checksum."""
    frozen = {name: p for name, p in layer._parameters.items() if p is not None and p.stop_gradient}
    return described({**frozen, **layer._buffers})


def hooks_of(layer: nn.Layer) -> dict[str, Any]:
    """The kinds and settings of the hooks before and after a layer's forward, such as spectral norm, without this
    package's hooks."""
    facts: dict[str, Any] = {}
    for word, table in (("before", layer._forward_pre_hooks), ("behind", layer._forward_post_hooks)):
        foreign = [hook for hook in table.values() if not _is_package_hook(hook)]
        for number, hook in enumerate(foreign):
            name = f"hook {word} {number}"
            facts |= {name: kind_of(hook)} | {
                f"{name}.{key}": value for key, value in settings_of(hook).items()
            }
    return facts


def _is_package_hook(hook: Any) -> bool:
    """True if a hook, or the function of a `partial`, is this package's."""
    return kind_of(hook.func if isinstance(hook, partial) else hook).startswith("paddle_dp.")


def described(
    values: Mapping[str, Any], depth: int = _DEPTH, named: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The `values` that can be compared, as JSON; functions, schedules and users' objects with their settings. `named`:
    the names in the code that has the values."""
    facts: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or may_differ(name, value):
            continue
        if (plain := _plain(value)) is not _NOTHING:
            facts[name] = plain
        elif depth:
            facts |= {
                f"{name}.{word}" if word else name: fact
                for word, fact in _within(value, depth, named).items()
            }
    return facts


def _within(value: Any, depth: int, named: frozenset[str]) -> dict[str, Any]:
    """The facts of an object ("": its kind), or of the entries of a list or a dict."""
    if isinstance(value, (list, tuple, Mapping)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        entries = _by_label((key, entry) for key, entry in pairs if not isinstance(entry, Parameter))
        return described(entries, depth - 1, named) if len(entries) <= _ENTRIES else {}
    if not _is_looked_into(value):
        return {}
    inner = settings_of(value, depth - 1, named if _is_user_object(value) else None)
    inner |= tensors_of(value) if isinstance(value, nn.Layer) else {}
    return {"": kind_of(value), **inner}


def may_differ(name: str, value: Any) -> bool:
    """True if a setting is a location, a device, a time, a random id, or this rank's number."""
    tokens = name.lower().strip("_").split("_")
    if isinstance(value, float):
        return _EPOCH < value <= time.time() and not value.is_integer()
    if isinstance(value, str):
        if value.startswith(tempfile.gettempdir() + os.sep) or _RANDOM_ID.fullmatch(value):
            return True
        if "host" in tokens or ("name" in tokens and _GENERATED.fullmatch(value)):
            return True
        if {"device", "place"} & {*tokens} and _DEVICES.fullmatch(value.lower()):
            return True
        return bool(_PATHS & {*tokens}) and os.sep in value
    numbered = tokens[-1] in _NUMBERS or not _PLACED.isdisjoint(tokens)
    return name == "training" or (numbered and type(value) is int)


def _plain(value: Any) -> Any:
    """A JSON value that is the same for the same numbers and words; _NOTHING if there is none."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, str):
        return _AT.sub("", value)
    if type(value) is int and _is_address(value):
        return _ADDRESS
    if value is None or isinstance(value, (bool, int, float)):
        finite = not isinstance(value, float) or math.isfinite(value)  # a checkpoint's JSON has no others
        return value if finite else str(value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, (np.ndarray, paddle.Tensor)):
        return _array(value)
    if isinstance(value, (set, frozenset)):
        items = [_plain_item(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in items) else _short(sorted(items, key=repr))
    if isinstance(value, (list, tuple)):
        inner: Any = [_plain_item(item) for item in value]
        return _NOTHING if any(item is _NOTHING for item in inner) else _short(inner)
    if isinstance(value, Mapping):
        inner = {key: _plain_item(item) for key, item in _by_label(value.items()).items()}
        return _NOTHING if any(item is _NOTHING for item in inner.values()) else _short(inner)
    return _NOTHING


def _by_label(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """The entries of a dict by labels that are the same in each process: keys may be objects, or their addresses."""
    entries: dict[str, Any] = {}
    for key, entry in pairs:
        plain = _NOTHING if isinstance(key, paddle.Tensor) else _plain(key)
        word = kind_of(key) if plain is _NOTHING else str(plain)
        entries[word if word not in entries else f"{word} ({len(entries)})"] = entry
    return entries


def _is_address(value: int) -> bool:
    """True if a number is the `id()` of a live object, such as a parameter: it differs between processes. (A Linux
    process has its memory above 2**44: smaller numbers need no search.)"""
    if value % 8 or not 2**44 < value < 2**48:
        return False
    if value not in _alive:
        _alive.clear()
        _alive.update(map(id, gc.get_objects()))
    return value in _alive


_alive: set[int] = set()  # ids of the objects at the last search


def _plain_item(value: Any) -> Any:
    """An item of a list or a dict; the model's parameters, as in an LSTM's list of them, are no settings."""
    return _NOTHING if isinstance(value, Parameter) else _plain(value)


def _short(values: Any) -> Any:
    text = json.dumps(values, default=str, sort_keys=True)
    return (
        values
        if len(text) <= _MAX_LIST_CHARS
        else f"CRC-32 {zlib.crc32(text.encode()):08x} of {len(values)} values"
    )


def _array(value: Any) -> Any:
    """«float32[2], CRC-32 0a1b2c3d»."""
    if isinstance(value, paddle.Tensor):
        if not (value._is_initialized() and value.stop_gradient):
            return _NOTHING  # learned tensors, and tensors made of them, are no settings
        dtype, size = str(value.dtype).rpartition(".")[2], value.numel().item() * value.element_size()
    else:
        dtype, size = str(value.dtype), value.nbytes
        if value.dtype.hasobject:
            return _NOTHING
    kind = f"{dtype}{list(value.shape)}"
    if size > _MAX_ARRAY_BYTES:
        return kind
    content = np.ascontiguousarray(value.numpy() if isinstance(value, paddle.Tensor) else value)
    return f"{kind}, CRC-32 {zlib.crc32(content.tobytes()):08x}"


def _is_looked_into(value: Any) -> bool:
    """True if a value's settings count: functions, schedules, layers without trained parameters, such as the loss that
    a function calls, and objects of a user's class, such as a configuration."""
    if isinstance(value, nn.Layer):
        return all(p.stop_gradient for p in value.parameters())
    if isinstance(value, FunctionType):
        return not kind_of(value).startswith("paddle_dp.")
    return isinstance(value, (partial, LRScheduler)) or _is_user_object(value)


def _is_user_object(value: Any) -> bool:
    """True if an object is of a user's class, or a namespace."""
    if isinstance(value, (SimpleNamespace, argparse.Namespace)):
        return True
    return not isinstance(value, (type, FunctionType, nn.Layer)) and not is_library(type(value).__module__)


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes of an object itself, also in slots. Private ones count for users' classes, and for layers (ELU
    keeps `_alpha`), without the attributes that every layer has."""
    attributes = {**_in_slots(thing), **getattr(thing, "__dict__", {})}
    if isinstance(thing, nn.Layer):
        return {name: value for name, value in attributes.items() if name not in _layer_attributes()}
    hidden = "_" if is_library(type(thing).__module__) else "__"
    return {name: value for name, value in attributes.items() if not name.startswith(hidden)}


@cache
def _named_by(kind: Any) -> frozenset[str]:
    """The names in the methods of a user's class, without generated methods (a dataclass's)."""
    functions = [
        function
        for base in kind.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if not name.startswith("__") or name in ("__call__", "__getitem__", "__iter__", "__len__", "__init__")
        if isinstance(function := _function_of(value), FunctionType)
    ]
    if is_dataclass(kind):
        functions = [function for function in functions if function.__name__ != "__init__"]
    return frozenset().union(*(names_in(function.__code__) for function in functions))


def _function_of(value: Any) -> Any:
    """The function of a class attribute that is a class or static method, or a property."""
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code, and its strings, which may be looked up by name; also in functions within it."""
    found = {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
    return frozenset(
        found.union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
    )


def _in_slots(thing: Any) -> dict[str, Any]:
    slots = (vars(base).get("__slots__", ()) for base in type(thing).__mro__)
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


@cache
def _layer_attributes() -> frozenset[str]:
    return frozenset(vars(nn.Layer()))


def _class_settings(kind: type) -> dict[str, Any]:
    """The class attributes that are plain values: the defaults of an object's attributes."""
    defaults: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not is_library(base.__module__):
            plain = {name: v for name, v in vars(base).items() if not name.startswith("__")}
            defaults |= {name: v for name, v in plain.items() if _plain(v) is not _NOTHING}
    return defaults


def _defaults(function: FunctionType) -> dict[str, Any]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def _closed(function: FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != type(cell)()}


def _entries_named(value: Any, names: frozenset[str]) -> Any:
    """The entries of a dict that a function names, if any: the dict may have a whole script's settings. Other values
    are unchanged."""
    if not isinstance(value, Mapping):
        return value
    some = {key: entry for key, entry in value.items() if isinstance(key, str) and key in names}
    return some or value


def _globals(function: FunctionType) -> dict[str, Any]:
    """The globals that a user's function reads and does not set."""
    if is_library(function.__module__):
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
        if not (isinstance(value, FunctionType) and is_library(value.__module__))
    }
