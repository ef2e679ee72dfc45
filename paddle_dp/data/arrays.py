"""Converts a data set's samples to arrays: one for inputs and one for targets, or structures of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_dp.batch import leaves, mapped, named_leaves
from paddle_dp.errors import DataError

Array = np.ndarray[Any, Any]
Arrays = Any
"""An array, or a structure of arrays."""
Pair = tuple[Arrays, Arrays]
_NUMBERS = "biufcV"  # NumPy's kinds: bool, integers, floats, complex; bfloat16 is a V
_PLAIN = frozenset(map(np.dtype, ("float32", "float64", "int32", "int64", "uint8", "bool")))
_UNKNOWN = (np.uint32, np.uint64, np.longdouble, np.clongdouble)  # to Paddle 3.3.1


def pair_of(sample: Any) -> Pair:
    """A sample's input and target, each an array or a structure of arrays. Raises DataError; its text continues a
    sample's name, "is no array: …"."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        form = f"{len(sample)} parts" if isinstance(sample, (tuple, list)) else type(sample).__name__
        hint = ": of several inputs, make one dict or tuple, ((a, b), target)" if "parts" in form else ""
        raise DataError(f"is {form}: return (input, target){hint}")
    try:
        pair = as_arrays(sample[0]), as_arrays(sample[1])
    except ValueError as error:  # lists of unequal lengths
        raise DataError(f"is no array: {error}") from None
    for name, structure in zip(("inputs", "targets"), pair, strict=True):
        if not leaves(structure):
            raise DataError(f"has no {name}: they are {structure}, without an array")
        for where, leaf in named_leaves(structure):
            if leaf.dtype.kind not in _NUMBERS or leaf.dtype in _UNKNOWN:
                at = f" at {where}" if where else ""
                raise DataError(f"is of type {leaf.dtype}{at}, which no tensor can hold{_origin(leaf)}")
    return pair


def _origin(leaf: Array) -> str:
    """Says how an object of a library, such as a graph, becomes arrays; "" for other arrays."""
    kind = type(leaf.reshape(-1)[0]) if leaf.dtype == object and leaf.size else int
    if kind.__module__ == "builtins":
        return ""
    return (
        f": it is a {kind.__module__}.{kind.__qualname__}. Give the arrays that make it, padded to one length (of a "
        "graph: nodes, edges, and the numbers of both), and build it in the model's forward (docs/add-a-part.md)"
    )


def is_plain(value: Any) -> bool:
    """True for an array that a tensor can hold without conversion. Cheap enough for every batch."""
    return type(value) is np.ndarray and value.dtype in _PLAIN


def as_arrays(value: Any) -> Arrays:
    """Converts a part of a sample to an array, or to a structure of arrays: a dict, or a tuple or list with arrays.

    A list of plain numbers becomes one array. Arrays are never merged: two arrays are two inputs. Raises ValueError.
    """
    if isinstance(value, Mapping):
        named = {str(key): as_arrays(value[key]) for key in value}
        if len(named) < len(value):
            raise ValueError(f"two of the keys {', '.join(map(repr, value))} are the same word")
        return named
    if isinstance(value, (tuple, list)) and (any(map(_holds_array, value)) or _are_of_types(value)):
        return tuple(map(as_arrays, value))
    return as_array(value)


def _are_of_types(values: Sequence[Any]) -> bool:
    """True if NumPy scalars differ in dtype, as a class and a weight do: one array would convert them."""
    return len({value.dtype for value in values if isinstance(value, np.generic)}) > 1


def _holds_array(value: Any) -> bool:
    """True if an entry of a tuple is or contains an array."""
    if isinstance(value, (tuple, list)):
        return any(map(_holds_array, value))
    return isinstance(value, Mapping) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def as_array(value: Any) -> Array:
    """Converts a part of a sample to an array in the machine's byte order. A Python float or a list of floats becomes
    float32, as in Paddle. Raises ValueError for uint16."""
    array = np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)
    if array.dtype == np.uint16 and isinstance(value, (np.ndarray, np.generic)):
        raise ValueError("it is of type uint16, which Paddle takes for the bits of bfloat16: give int32")
    if array.dtype == np.float64 and isinstance(value, (list, tuple)):
        return array.astype(np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def rows_of(arrays: Arrays, rows: int | slice) -> Arrays:
    """Returns one or several rows of every array."""
    return mapped(lambda array: array[rows], arrays)


def describe(arrays: Arrays) -> str:
    """ "float32[3, 224, 224]"; "{ids: int64[12], mask: bool[12]}"; also of specs, which have a dtype and a shape."""
    if isinstance(arrays, dict):
        return "{" + ", ".join(f"{key}: {describe(arrays[key])}" for key in sorted(arrays)) + "}"
    if isinstance(arrays, (tuple, list)):
        return "(" + ", ".join(map(describe, arrays)) + ")"
    return f"{np.dtype(arrays.dtype)}{list(arrays.shape)}"
