"""Reads old pickle files of arrays, numbers and texts as data, without calling anything in them."""

from __future__ import annotations

from typing import Any

from paddle_dp.errors import DataError
from paddle_dp.unpickle import ARRAYS, PickleMachine

LARGEST = 256 << 20  # bytes of a file; CIFAR-100's largest has 155 million
MOST = 2_000_000  # operations; that file has some 250 thousand


def read_pickled(content: bytes, location: str) -> dict[str, Any]:
    """The dict in a pickle: its values are arrays, numbers, texts, or lists of these. Raises DataError for anything
    else."""
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MB")
        loaded = PickleMachine(ARRAYS, most=MOST).run(content)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{location} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{location} holds a {type(loaded).__name__}, not a dict")
    return loaded
