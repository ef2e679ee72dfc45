"""The sites of a file at which one small change makes a mutant, and the code with that change.

A site is inside a function, and neither what refuses (`raise`, `assert`, a test that only raises), nor what tells
(a heartbeat, a log, a check), nor an annotation: of those no trained number can be wrong.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
OF_MESH = {"dp_rank": "rank", "dp_size": "ranks", "rank": "dp_rank", "ranks": "dp_size"}
OF_AXES = {"tensor": "data", "pipeline": "data", "sharding": "data", "sequence": "tensor"}
TELLS = re.compile(
    r"heartbeat|traffic|tape|late_ranks|film|warn|print|log|check|require|note|recorder|timeline"
)
CONTEXT = re.compile(
    r"no_grad|no_sync|exchang|around|scope|guard|present|dummy|paused|lent|alone|context|mode"
)
NOTHING = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body


@dataclass(frozen=True, kw_only=True)
class Site:
    """Site number `number` of a file. It is known by its `key`, which a move to another line does not change."""

    file: str  # from the root of the repository
    number: int
    line: int  # of the changed expression
    function: str
    text: str  # of that line
    mutation: str  # "compare: a < b → a <= b"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """File, function, text of the line, mutation."""
        return self.file, self.function, self.text, self.mutation


@dataclass(frozen=True)
class _Change:
    kind: str
    node: ast.AST
    attribute: str
    value: Any

    def apply(self) -> Any:
        """Returns the value before, with which `attribute` can be set back."""
        before = getattr(self.node, self.attribute)
        setattr(self.node, self.attribute, self.value)
        return before


@dataclass(frozen=True)
class _Visited:
    change: _Change
    shown: ast.AST  # the smallest expression or statement around it that says where it is
    function: str
    line: int


def sites(file: str, source: str) -> list[Site]:
    """The sites of a file of this source, always in the same order."""
    lines, found = source.splitlines(), []
    for number, visited in enumerate(_visit(ast.parse(source))):
        before = _text(visited.shown)
        original = visited.change.apply()
        mutation = f"{visited.change.kind}: {before} → {_text(visited.shown)}"
        setattr(visited.change.node, visited.change.attribute, original)
        text = lines[visited.line - 1].strip()
        found.append(
            Site(file=file, number=number, line=visited.line, function=visited.function, text=text, mutation=mutation)
        )  # fmt: skip
    return found


def mutated(source: str, number: int) -> ast.Module:
    """The syntax tree of this source with the change at site `number`."""
    tree = ast.parse(source)
    next(islice(_visit(tree), number, None)).change.apply()
    return ast.fix_missing_locations(tree)


def changed_codes(path: Path, number: int) -> list[tuple[CodeType, CodeType]]:
    """Each code object of the file that the change at site `number` alters, with its altered form.

    Empty where the compiler makes the same of both, and where the change needs another closure, which live functions
    cannot be given.
    """
    source = path.read_text()
    plain = compile(source, str(path), "exec", dont_inherit=True)
    other = compile(mutated(source, number), str(path), "exec", dont_inherit=True)
    pairs = list(_pairs(plain, other))
    if any(a.co_freevars != b.co_freevars for a, b in pairs):
        return []
    return [(a, b) for a, b in pairs if a != b]


def _pairs(plain: CodeType, other: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Functions of two modules that differ in an expression, and what is inside of them, one by one."""
    inner = ([code for code in each.co_consts if isinstance(code, CodeType)] for each in (plain, other))
    for a, b in zip(*inner, strict=False):  # an expression that is dropped may have held a lambda
        if a.co_name == b.co_name:
            yield a, b
            yield from _pairs(a, b)


def _visit(tree: ast.Module) -> Iterator[_Visited]:
    for child in tree.body:
        yield from _below(child, "", None, 0)


def _below(node: ast.AST, scope: str, around: ast.AST | None, line: int) -> Iterator[_Visited]:
    """`scope`: the functions and classes around the node; `around`: what holds it, None outside of functions."""
    line = getattr(node, "lineno", line)
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    shown = around if isinstance(node, ast.Constant | ast.keyword) and around is not None else node
    for change in _changes(node) if around is not None else ():
        yield _Visited(change, shown, scope, line)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        scope = f"{scope}.{node.name}".strip(".")
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        around = node
    elif isinstance(node, ast.ClassDef):
        around = None
    elif around is not None:
        around = shown
    for child in _children(node):
        yield from _below(child, scope, around, line)


def _children(node: ast.AST) -> list[ast.AST]:
    if isinstance(
        node, ast.FunctionDef | ast.Lambda
    ):  # defaults and decorators are computed when the file is imported
        return list(node.body) if isinstance(node.body, list) else [node.body]
    if isinstance(node, ast.If) and all(isinstance(statement, ast.Raise) for statement in node.body):
        return list(node.orelse)
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _tells(node.value):
        return []
    return list(ast.iter_child_nodes(node))


def _tells(call: ast.Call) -> bool:
    return bool(TELLS.search(ast.unparse(call.func)))


def _text(node: ast.AST) -> str:
    """One line, with the quotes of any Python version."""
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {_text(node.test)}"
    if isinstance(node, ast.With):
        return f"with {', '.join(map(_text, node.items))}"
    return " ".join(ast.unparse(node).split()).replace('"', "'")


def _changes(node: ast.AST) -> list[_Change]:  # noqa: C901 - a table of kinds of nodes
    """The changes at this node; an expression has two at most."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            return [_Change("compare", node, "ops", [OPPOSITE[type(op)]()])]
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPPOSITE:
            is_text = any(isinstance(n, ast.JoinedStr) for n in ast.walk(node))
            return [] if is_text else [_Change("arithmetic", node, "op", OPPOSITE[type(op)]())]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return [_Change(f"constant{by:+d}", node, "value", number + by) for by in (1, -1)]
        case ast.BoolOp(op=op):
            return [_Change("and/or", node, "op", OPPOSITE[type(op)]())]
        case ast.Expr(value=ast.Call() as call):
            return [] if _tells(call) else [_Change("drop call", node, "value", ast.Constant(None))]
        case ast.Call():
            return _of_call(node)
        case ast.keyword(arg="axis", value=ast.Constant(value=int() as axis)):
            return [_Change("other axis", node, "value", ast.Constant(1 - abs(axis)))]
        case ast.Attribute(attr=name, value=owner):
            words = ast.unparse(owner)
            other = OF_MESH.get(name) if "mesh" in words else OF_AXES.get(name) if "axes" in words else None
            return [_Change("other axis", node, "attr", other)] if other else []
        case ast.Slice(lower=lower, upper=upper):
            ends = [("slice from", "lower", lower, 1), ("slice to", "upper", upper, -1)]
            return [_Change(kind, node, name, _moved(end, by)) for kind, name, end, by in ends if end]
        case ast.With(items=items):
            gone = [i for i in items if i.optional_vars is None and CONTEXT.search(ast.unparse(i))]
            return [_Change("no context", gone[0], "context_expr", NOTHING)] if gone else []
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            only_raises = isinstance(node, ast.If) and all(isinstance(s, ast.Raise) for s in node.body)
            return [] if only_raises else [_Change("negate", node, "test", ast.UnaryOp(ast.Not(), test))]
    return []


def _of_call(node: ast.Call) -> list[_Change]:
    args = node.args
    if isinstance(node.func, ast.Name) and node.func.id == "range":
        at = min(1, len(args) - 1)
        return [_Change("range-1", node, "args", [*args[:at], _moved(args[at], -1), *args[at + 1 :]])]
    if len(args) < 2 or any(isinstance(each, ast.Starred) for each in args[:2]) or _tells(node):
        return []
    return [_Change("swap arguments", node, "args", [args[1], args[0], *args[2:]])]


def _moved(end: ast.expr, by: int) -> ast.BinOp:
    return ast.BinOp(end, ast.Add() if by > 0 else ast.Sub(), ast.Constant(1))
