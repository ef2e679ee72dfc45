"""Reading old pickle files without running what is in them.

A pickle is a program. This reader knows the handful of words that arrays, bytes, lists and dicts are made of, and
refuses every other word before anything of it is run.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from paddle_dp.errors import DataError

_RECONSTRUCT = np.empty(0).__reduce__()[0]  # its home has moved from one NumPy to another


def _latin1(text: str, encoding: str) -> bytes:
    """The bytes of Python 2, as Python 3 pickles them for it: codecs.encode, but of this one encoding."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written in latin1, not in {encoding}")
    return text.encode("latin1")


_WORDS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,  # type: ignore[dict-item]
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,  # type: ignore[dict-item]
    ("_codecs", "encode"): _latin1,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _WORDS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array is made of")
        return _WORDS[module, name]


def read_pickled(content: bytes, where: str) -> dict[str, Any]:
    """The dict of arrays and lists in a pickle; a DataError when it is something else, or would run something."""
    try:
        found = _Reader(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{where} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{where} holds a {type(found).__name__}, not a dict")
    return found
