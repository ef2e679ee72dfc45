"""Reads old pickle files as data, without Python's pickle: nothing in them is called.

A pickle is a program for a small machine, which may call any function. This is a smaller machine: it makes a dict of
arrays, of numbers and texts and of lists of them, and refuses everything else. Its size is bounded by the file's.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.errors import DataError

LARGEST = 256 << 20  # bytes of a file; CIFAR-100's largest has 155 million
MOST = 2_000_000  # operations; that file has some 250 thousand

_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}
_SCALARS = (int, float, str, bytes, type(None))
_ARRAY = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_FUNCTIONS = (*_ARRAY, "numpy ndarray", "numpy dtype", "_codecs encode")


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass
class _DType:
    code: str
    order: str = "|"


class _Blank:
    """An array before its numbers."""


def read_pickled(content: bytes, where: str) -> dict[str, Any]:
    """The dict in a pickle: its values are arrays, numbers, texts, or lists of numbers and texts. Raises DataError for
    anything else."""
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it is larger than {LARGEST >> 20} MB")
        loaded = _Machine().run(content)
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{where} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{where} holds a {type(loaded).__name__}, not a dict")
    return loaded


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number == MOST:
                raise ValueError(f"it has more than {MOST:,} operations")
            if operation.name == "STOP":
                return self.stack.pop()
            self._do(operation.name, argument)
        raise ValueError("it does not end")

    def _do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _PUT or name == "MEMOIZE":
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name in _GET:
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name not in ("PROTO", "FRAME"):
            self._make(name, argument)

    def _make(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "GLOBAL":
            stack.append(_known(argument))
        elif name == "STACK_GLOBAL":
            stack.append(_known(f"{_of(str, stack.pop(-2))} {_of(str, stack.pop())}"))
        elif name == "REDUCE":
            arguments = _of(tuple, stack.pop())
            stack[-1] = _called(_of(_Global, stack[-1]).name, arguments)
        elif name == "BUILD":
            state = _of(tuple, stack.pop())
            stack[-1] = _with_state(stack[-1], state)
        else:
            self._collect(name)

    def _collect(self, name: str) -> None:
        """Makes a list or a dict, or puts more into one."""
        stack = self.stack
        if name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("LIST", "DICT"):
            stack.append(_flat(self._marked()) if name == "LIST" else _pairs(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            items = _flat([stack.pop()] if name == "APPEND" else self._marked())
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._marked()
            _of(dict, stack[-1]).update(_pairs(items))
        else:
            raise ValueError(f"it uses {name}, which no array needs")

    def _marked(self) -> list[Any]:
        """Takes what stands above the last mark."""
        at = self.marks.pop()
        taken = self.stack[at:]
        del self.stack[at:]
        return taken


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _known(name: str) -> _Global:
    if name not in _FUNCTIONS:
        raise ValueError(f"it asks for {name.replace(' ', '.')[:80]}, which no array needs")
    return _Global(name)


def _flat(items: list[Any]) -> list[Any]:
    """The items of a list: no list among them, which could stand for more values than any memory holds."""
    if not all(isinstance(item, _SCALARS) for item in items):
        raise ValueError("a list holds other than numbers and texts")
    return items


def _pairs(items: list[Any]) -> dict[str, Any]:
    keys, values = items[::2], items[1::2]
    if not all(isinstance(value, (*_SCALARS, list, np.ndarray)) for value in values):
        raise ValueError("a dict holds other than arrays, numbers, texts and lists")
    return {str(key): value for key, value in zip(_flat(keys), values, strict=True)}


def _called(name: str, arguments: Any) -> Any:
    """What one of the known functions returns."""
    if name in _ARRAY and arguments[0] == _Global("numpy ndarray"):
        return _Blank()
    if name == "numpy dtype" and re.fullmatch(r"[<>|=]?[biuf][1248]", _of(str, arguments[0])):
        return _DType(arguments[0])
    if name == "_codecs encode" and arguments[1] == "latin1":  # how Python 3 writes bytes for Python 2
        return _of(str, arguments[0]).encode("latin1")
    raise ValueError(f"it calls {name.replace(' ', '.')} with what no array needs")


def _with_state(made: Any, state: Any) -> Any:
    """An array, or its kind of numbers, with what the file says of it."""
    if isinstance(made, _DType):
        made.order = _of(str, state[1])
        return made
    _of(_Blank, made)
    _, shape, dtype, is_fortran, numbers = state
    raw = numbers.encode("latin1") if isinstance(numbers, str) else numbers
    kind = np.dtype(_of(_DType, dtype).code)
    flat = np.frombuffer(raw, kind if dtype.order == "|" else kind.newbyteorder(dtype.order))
    return flat.reshape(shape, order="F" if is_fortran else "C")
