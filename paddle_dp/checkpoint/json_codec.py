"""Lossless JSON of plain values, NaN and infinity included."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# The key of an encoded NaN or infinity: JSON has neither, and other readers refuse Python's NaN literal.
_FLOAT = "$float"
MOST_BYTES, _MOST_GROUPS, _MOST_DIMS = 64 * 2**20, 500_000, 32


def encode(value: Any, name: str = "state") -> bytes:
    """`value` as standard JSON. Raises TypeError, with the path below `name`, for a value that is not plain."""
    return (json.dumps(_plain(value, name), allow_nan=False, indent=1) + "\n").encode()


def decode(text: bytes) -> Any:
    """The value that was encoded; tuples become lists. Raises ValueError for anything but standard JSON, and for more
    than a checkpoint contains: an empty list is two characters in a file and 64 bytes in memory."""
    if len(text) > MOST_BYTES or text.count(b"[") + text.count(b"{") > _MOST_GROUPS:
        raise ValueError("has more in it than any checkpoint")
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage, and scanning half a million lists repeatedly takes seconds
    try:
        return json.loads(text, object_hook=_decode_float, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    finally:
        if collecting:
            gc.enable()


def mapping(value: Any, name: str) -> dict[str, Any]:
    """Returns `value` if it is a mapping, else raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no group of values")
    return value


def natural(value: Any, name: str) -> int:
    """Returns `value` if it is an integer in [0, 2^62), else raises ValueError."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} is {str(value)[:30]!r}, which is no size")
    return value


def naturals(value: Any, name: str) -> tuple[int, ...]:
    """Returns `value` as a tuple if it is a list of at most 32 (a tensor's dims) naturals, else raises ValueError."""
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        raise ValueError(f"{name} is no list of sizes")
    return tuple(natural(size, name) for size in value)


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(k, path): _plain(v, f"{path}.{k}") for k, v in value.items()}
    raise TypeError(f"{path} is a {type(value).__name__}: a checkpoint's state holds plain JSON values only")


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str) or key == _FLOAT:
        raise TypeError(f"{path} has the key {key!r}: keys must be strings other than {_FLOAT}")
    return key


def _decode_float(value: dict[str, Any]) -> Any:
    if value.keys() != {_FLOAT}:
        return value
    if value[_FLOAT] not in ("nan", "inf", "-inf"):
        raise ValueError(f"{_FLOAT} is {str(value[_FLOAT])[:30]!r}")
    return float(value[_FLOAT])


def _refuse(literal: str) -> Any:
    raise ValueError(f"{literal} is not JSON")
