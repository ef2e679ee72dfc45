"""Copies of functions, so that a function that remembers its calls can be called without a trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from paddle_dp.identity.walk import is_library

T = TypeVar("T")
_UNCHANGEABLE = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ufunc)
_LARGEST_ARRAY = 1 << 20  # bytes
_DRAWS = {"random", "rand", "randn", "randint", "uniform", "normal", "choice", "shuffle", "secrets"}


class UncopiedError(Exception):
    """A function reads something that cannot be copied, or that is too large for it, such as a model."""


def copied_function(function: T) -> T:
    """A function that gives the same results and shares no memory with `function` that either could write to: the
    closure, the defaults, the attributes and the globals that its code names are copies.

    Raises UncopiedError if it, or a value that it reads, is something else than functions, modules, numbers, texts,
    containers and namespaces of these, or if it draws random numbers.
    """
    return _copied(function, {})


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """`copies`: the copies by the ids of the originals, for values that refer to themselves."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, _UNCHANGEABLE) or _is_of_library(value):
        return value
    if isinstance(value, FunctionType):
        return _rebuilt(value, copies)
    if type(value) is np.ndarray and value.nbytes <= _LARGEST_ARRAY:
        return value.copy()
    if type(value) in (set, tuple, frozenset):
        return type(value)(_copied(each, copies) for each in value)
    copy: Any
    if type(value) is list:
        copies[id(value)] = copy = []  # before its content, which may refer to it
        copy.extend(_copied(each, copies) for each in value)
        return copy
    if type(value) is dict:
        copies[id(value)] = copy = {}
        copy.update({key: _copied(each, copies) for key, each in value.items()})
        return copy
    if type(value) in (SimpleNamespace, argparse.Namespace):
        copies[id(value)] = copy = type(value)()
        vars(copy).update({name: _copied(each, copies) for name, each in vars(value).items()})
        return copy
    raise UncopiedError(f"{type(value).__name__} is not copied")


def _is_of_library(value: Any) -> bool:
    """True for a library's module, class or function that keeps no numbers between its calls, so draws none."""
    if isinstance(value, ModuleType):
        return is_library(value.__name__) and value.__name__.rpartition(".")[2] not in _DRAWS
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
        return False
    if not isinstance(value, (BuiltinFunctionType, FunctionType, type)):
        return False
    return is_library(value.__module__) and value.__name__ not in _DRAWS


def _rebuilt(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    names = set(_names(function.__code__))
    if drawn := names & _DRAWS:
        raise UncopiedError(f"it draws random numbers: {min(drawn)}")
    # Functions that share a cell or their globals share the copies, too.
    cells = tuple(copies.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
    scope = copies.setdefault(id(function.__globals__), dict(function.__globals__))
    copy = FunctionType(function.__code__, scope, function.__name__, closure=cells)
    copies[id(function)] = copy
    for name in names & scope.keys():
        if scope[name] is function.__globals__.get(name):
            scope[name] = _copied(scope[name], copies)
    for cell, original in zip(cells, function.__closure__ or (), strict=True):
        if original != CellType() and cell == CellType():  # assigned, and not copied yet
            cell.cell_contents = _copied(original.cell_contents, copies)
    copy.__defaults__ = _copied(function.__defaults__, copies)
    copy.__kwdefaults__ = _copied(function.__kwdefaults__, copies)
    vars(copy).update(_copied(vars(function), copies))
    return copy


def _names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function's code and in the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
