"""JSON that decodes to what was encoded: plain values only, NaN and infinity included."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Key of an encoded NaN or infinity: JSON has neither, and other readers refuse the NaN that Python writes.
_FLOAT = "$float"


def encode(value: Any, what: str = "state") -> bytes:
    """`value` as standard JSON. Raises TypeError, with its place under `what`, for a value that is not plain."""
    return (json.dumps(_plain(value, what), allow_nan=False, indent=1) + "\n").encode()


def decode(text: bytes) -> Any:
    """The value that was encoded; tuples become lists. Raises ValueError for anything but standard JSON."""
    return json.loads(text, object_hook=_decode_float, parse_constant=_refuse)


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(k, where): _plain(v, f"{where}.{k}") for k, v in value.items()}
    raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint's state holds plain JSON values only")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or key == _FLOAT:
        raise TypeError(f"{where} has the key {key!r}: keys must be strings other than {_FLOAT}")
    return key


def _decode_float(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if value.keys() == {_FLOAT} else value


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
