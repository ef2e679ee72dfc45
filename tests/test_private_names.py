"""Every private name of Paddle that the package uses is in docs/private-names.md, and the installed Paddle has it.

What is private begins with one underscore. Uses are found in the source: attributes of what was imported from Paddle,
attributes that nothing in the same file defines, and, in classes that derive from Paddle's, what those have themselves.
The names that a `Patch` replaces stand in the tables of `paddle_dp.gloo` and `paddle_dp.core.dropout.calls`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.gloo.patch import look_up
from tools.syntax import nodes_of, parsed, uncollected, walk

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/private-names.md"
FILES = sorted((ROOT / "paddle_dp").rglob("*.py"))
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "wrap")  # wrap: of audit.hooks.watch


@dataclass(frozen=True)
class Row:
    owner: str
    names: tuple[str, ...]
    files: tuple[str, ...]


@cache
def rows() -> list[Row]:
    made = []
    for line in (ROOT / PAGE).read_text().splitlines():
        if line.startswith("| `"):
            owner, names, files, _ = (re.findall("`([^`]+)`", cell) for cell in line.strip("|").split("|"))
            made.append(Row(owner[0], tuple(names), tuple(files)))
    return made


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def uses(
    code: str, ours: Container[str] = (), bases: dict[str, tuple[type, ...]] | None = None
) -> Iterator[tuple[str, int]]:
    """The private names of Paddle that a file uses, and their lines.

    `ours`: names that another file of the package defines. `bases`: what the file's classes derive from in Paddle.
    """
    nodes = nodes_of(parsed(code))
    imported, own = dict(_imported(nodes)), defined(nodes)
    for name, line in _imported_names(nodes):
        yield from ((part, line) for part in name.split(".") if private(part))
    for node in nodes:
        if isinstance(node, ast.Attribute) and private(node.attr) and not _of_self(node):
            origin = imported.get(_head(node), "")
            if origin.partition(".")[0] == "paddle" or not (origin or node.attr in own or node.attr in ours):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            word = node.args[1] if len(node.args) > 1 else None
            if isinstance(word, ast.Constant) and private(str(word.value)) and word.value not in own:
                yield str(word.value), node.lineno
        elif isinstance(node, ast.ClassDef) and bases and node.name in bases:
            yield from _shared_with(bases[node.name], node)


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that a file defines: functions, classes, variables, fields, and what is set on `self`."""
    named = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    variables = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stores = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return named | variables | {n.attr for n in stores if _of_self(n)}


def _of_self(node: ast.Attribute) -> bool:
    """Whether this is self.x, cls.x or super().x itself, not something behind it."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """The names that imports make, and what they stand for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _imported_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paddle":
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def _head(node: ast.expr) -> str:
    """The name with which an expression like a.b().c begins."""
    while not isinstance(node, ast.Name):
        inner = getattr(node, "value", None) or getattr(node, "func", None)
        if not isinstance(inner, ast.expr):
            return ""
        node = inner
    return node.id


def _shared_with(paddles: tuple[type, ...], node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    """What a class that derives from Paddle's overrides, sets or reads of them."""
    for inner in walk(node):
        if isinstance(inner, ast.FunctionDef):
            name = inner.name
        elif isinstance(inner, ast.Attribute) and _of_self(inner):
            name = inner.attr
        else:
            continue
        if private(name) and any(has(kind, name) for kind in paddles):
            yield name, inner.lineno


def has(owner: Any, name: str) -> bool:
    """Whether `owner` has `name`, or is a class whose methods set it on `self`."""
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(
        name in _set_on_self(kind) for kind in owner.__mro__ if kind is not object
    )


@cache
def _set_on_self(kind: type) -> set[str]:
    """The names behind `self.` in the source of a class."""
    try:
        return {*re.findall(r"\bself\.(\w+)", inspect.getsource(kind))}
    except (OSError, TypeError):  # written in C++
        return set()


def paddles_bases(module: str) -> dict[str, tuple[type, ...]]:
    """The classes of a module that derive from Paddle's, each with those; a mixin's are those that it is mixed with."""
    made = vars(importlib.import_module(module)).values()
    bases: dict[str, tuple[type, ...]] = {}
    for kind in made:
        if isinstance(kind, type) and kind.__module__ == module:
            paddles = tuple(k for k in kind.__mro__ if _package(k) == "paddle")
            for own in (k for k in kind.__mro__ if paddles and vars(k).get("__module__") == module):
                bases[own.__name__] = (*bases.get(own.__name__, ()), *paddles)
    return bases


def _package(kind: type) -> str:
    return str(vars(kind).get("__module__")).partition(".")[0]


@cache
def found() -> dict[tuple[str, str], list[int]]:
    """(file, private name of Paddle) → lines, of the whole package."""
    made: dict[tuple[str, str], list[int]] = {}
    listed = {name for row in rows() for name in row.names}
    with uncollected():
        ours = {name for f in FILES for name in defined(nodes_of(parsed(f.read_text())))} - listed
    for file in FILES:
        code, place = file.read_text(), file.relative_to(ROOT / "paddle_dp").as_posix()
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        bases = paddles_bases(module) if re.search(r"^class \w+\(", code, re.M) else {}
        for name, line in uses(code, ours, bases):
            made.setdefault((place, name), []).append(line)
    return made


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    table = {(file, name) for row in rows() for name in row.names for file in row.files}
    missing = [
        f"paddle_dp/{file}:{lines[0]}: {name}"
        for (file, name), lines in found().items()
        if (file, name) not in table
    ]
    assert not missing, f"not in {PAGE}:\n" + "\n".join(missing)


def test_every_name_in_the_table_is_used_where_it_says() -> None:
    idle = [
        f"{file}: {row.owner}.{name}"
        for row in rows()
        for name in row.names
        for file in row.files
        if (file, name) not in found()
    ]
    assert not idle, f"in {PAGE}, and not used there:\n" + "\n".join(idle)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.owner)
def test_this_paddle_has_it(row: Row) -> None:
    """The upgrade canary: what is missing in a new Paddle, and which file then needs another way."""
    importlib.import_module("paddle.distributed.fleet")
    owner = look_up(row.owner)
    lacks = [name for name in row.names if not has(owner, name)]
    gone = ", ".join([f"{row.owner}.{name}" for name in lacks] if owner is not None else [row.owner])
    assert not gone, f"this Paddle has no {gone}: see {', '.join(row.files)}, and {PAGE}"


def test_uses_are_seen_wherever_they_stand() -> None:
    code = """
import paddle, sys
from paddle.a._b import c
from paddle_dp.x import y
class Ours:
    def _mine(self): return self._mine, self._inherited
def f(tensor):
    tensor._set = 1
    return tensor._inner, paddle._C_ops, getattr(tensor, "_word"), y._of_ours, tensor.__dict__, f._mine, f._elsewhere
"""
    seen = sorted({name for name, _ in uses(code, ours=["_elsewhere"])})
    assert seen == ["_C_ops", "_b", "_inner", "_set", "_word"]


class Sets:
    def __init__(self) -> None:
        self._set = 1


def test_a_class_has_what_its_methods_set() -> None:
    class Below(Sets):
        pass

    assert has(Below, "_set") and not has(Below, "_nothing")
