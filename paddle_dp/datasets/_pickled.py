"""Reads old pickle files without running code from them.

A pickle is a program. This reader knows the few functions that arrays, bytes, lists and dicts need, and refuses every
other one before it is called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from paddle_dp.errors import DataError

_RECONSTRUCT = np.empty(0).__reduce__()[0]  # its module's name changed in NumPy 2


def _latin1(text: str, encoding: str) -> bytes:
    """codecs.encode for latin1 only, with which Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written in latin1, not in {encoding}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,  # type: ignore[dict-item]
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # type: ignore[dict-item]
    ("_codecs", "encode"): _latin1,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return _ALLOWED[module, name]


def read_pickled(content: bytes, where: str) -> dict[str, Any]:
    """The dict of arrays and lists in a pickle. Raises DataError for anything else, and for one that would run code."""
    try:
        loaded = _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{where} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{where} holds a {type(loaded).__name__}, not a dict")
    return loaded
