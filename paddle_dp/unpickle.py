"""Reads pickle files as data, without Python's pickle: nothing in them is called.

A pickle is a program for a small machine, which may call any function. This machine is smaller: it makes dicts, lists,
numbers, texts and arrays, calls listed functions only, and refuses everything else by name. Its size is bounded by the
file's.
"""

from __future__ import annotations

import io
import pickletools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

Function = Callable[..., Any]
SCALARS = (int, float, str, bytes, type(None))
_IN_DICT = (*SCALARS, list, np.ndarray)
SMALL = 4096  # bytes; a longer text of bytes may be left in the file

_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
_HEADS = {"BINBYTES": 5, "BINBYTES8": 9}  # bytes before the content
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT, _GET = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


@dataclass(frozen=True)
class PickleName:
    """A function or class that a pickle names; it is not looked up."""

    name: str


@dataclass(frozen=True)
class Span:
    """Bytes that stay in the file."""

    start: int
    size: int


@dataclass(frozen=True)
class Lying:
    """An array that stays in the file, contiguous from byte `start` (`is_fortran`: column by column)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    is_fortran: bool


@dataclass
class _DType:
    code: str
    order: str = "|"


class _Blank:
    """An array without its numbers yet."""


class PickleMachine:
    """Runs one pickle.

    `functions`: the functions that it may call, by "module name". `most`: the limit of operations. `nested`: whether
    lists and dicts may contain each other, which may expand to far more than the file. `persistent`: makes the value of
    a persistent id. `leave`: whether long bytes stay in the file, as a `Span`.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        *,
        most: int,
        nested: bool = False,
        persistent: Function | None = None,
        leave: bool = False,
    ):
        self.functions, self.persistent, self.leave = functions, persistent, leave
        self.most, self.nested = most, nested
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, file: BinaryIO | bytes) -> Any:
        """Returns the pickle's value; the file is then positioned after the pickle. Raises ValueError for a refused
        operation; a damaged pickle may raise any error."""
        file = io.BytesIO(file) if isinstance(file, bytes) else file
        for number, (operation, operand, position) in enumerate(pickletools.genops(file)):
            if number == self.most:
                raise ValueError(f"it has more than {self.most:,} operations")
            if operation.name == "STOP":
                return self.stack.pop()
            argument: Any = operand
            is_long = isinstance(argument, bytes) and len(argument) > SMALL
            if self.leave and is_long and operation.name in _HEADS and position is not None:
                argument = Span(position + _HEADS[operation.name], len(argument))
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
            stack.append(self._known(argument))
        elif name == "STACK_GLOBAL":
            stack.append(self._known(f"{expect(str, stack.pop(-2))} {expect(str, stack.pop())}"))
        elif name == "REDUCE":
            arguments = expect(tuple, stack.pop())
            stack[-1] = self._called(expect(PickleName, stack[-1]).name, arguments)
        elif name == "BUILD":
            state = stack.pop()
            stack[-1] = (
                stack[-1] if isinstance(stack[-1], dict) else _with_state(stack[-1], expect(tuple, state))
            )
        elif name == "BINPERSID" and self.persistent is not None:
            stack[-1] = self.persistent(stack[-1])
        else:
            self._collect(name)

    def _collect(self, name: str) -> None:
        """Makes a list or a dict, or extends one."""
        stack = self.stack
        if name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("LIST", "DICT"):
            stack.append(self._items(self._marked()) if name == "LIST" else self._pairs(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            items = self._items([stack.pop()] if name == "APPEND" else self._marked())
            expect(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._marked()
            expect(dict, stack[-1]).update(self._pairs(items))
        else:
            raise ValueError(f"it uses {name}, which no array needs")

    def _marked(self) -> list[Any]:
        """Pops everything above the last mark."""
        at = self.marks.pop()
        popped = self.stack[at:]
        del self.stack[at:]
        return popped

    def _known(self, name: str) -> PickleName:
        if name not in self.functions:
            raise ValueError(f"it asks for {name.replace(' ', '.')[:80]}, which no array needs")
        return PickleName(name)

    def _called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return self.functions[name](*arguments)
        except (TypeError, ValueError) as error:
            why = str(error) if isinstance(error, ValueError) else ""
            raise ValueError(why or f"it calls {name.replace(' ', '.')} as no array does") from None

    def _items(self, items: list[Any]) -> list[Any]:
        """Checks the items of a list: nested lists could expand to more than any memory holds."""
        if not self.nested and not all(isinstance(item, SCALARS) for item in items):
            raise ValueError("a list holds other than numbers and texts")
        return items

    def _pairs(self, items: list[Any]) -> dict[str, Any]:
        keys, values = items[::2], items[1::2]
        if not all(isinstance(key, SCALARS) for key in keys):
            raise ValueError("a dict has keys other than numbers and texts")
        if not self.nested and not all(isinstance(value, _IN_DICT) for value in values):
            raise ValueError("a dict holds other than arrays, numbers, texts and lists")
        return {str(key): value for key, value in zip(keys, values, strict=True)}


def expect(kind: Any, value: Any) -> Any:
    """Returns the value. Raises ValueError unless it is of this type."""
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _reconstruct(kind: PickleName, *shape_and_code: Any) -> _Blank:
    if kind != PickleName("numpy ndarray"):
        raise ValueError
    return _Blank()


def _dtype(code: str, *flags: Any) -> _DType:
    if not re.fullmatch(r"[<>|=]?[biuf][1248]", expect(str, code)):
        raise ValueError
    return _DType(code)


def _encode(text: str, encoding: str) -> bytes:
    """Restores bytes that Python 3 pickled for Python 2."""
    if encoding != "latin1":
        raise ValueError
    return bytes(expect(str, text).encode("latin1"))


def _never(*arguments: Any) -> Any:
    raise ValueError


ARRAYS: dict[str, Function] = {
    "numpy.core.multiarray _reconstruct": _reconstruct,
    "numpy._core.multiarray _reconstruct": _reconstruct,
    "numpy ndarray": _never,
    "numpy dtype": _dtype,
    "_codecs encode": _encode,
}
"""The functions that NumPy's arrays call in a pickle."""


def _with_state(target: Any, state: Any) -> Any:
    """Applies a pickled state to an array or a dtype."""
    if isinstance(target, _DType):
        target.order = expect(str, state[1])
        return target
    expect(_Blank, target)
    _, shape, dtype, is_fortran, numbers = state
    kind = np.dtype(expect(_DType, dtype).code)
    kind = kind if dtype.order == "|" else kind.newbyteorder(dtype.order)
    if isinstance(numbers, Span):
        shape = tuple(expect(int, size) for size in shape)
        if min(shape, default=0) < 0 or int(np.prod(shape, dtype=object)) * kind.itemsize != numbers.size:
            raise ValueError("it describes an array wrongly")
        return Lying(kind, shape, numbers.start, bool(is_fortran))
    raw = numbers.encode("latin1") if isinstance(numbers, str) else numbers
    return np.frombuffer(raw, kind).reshape(shape, order="F" if is_fortran else "C")
