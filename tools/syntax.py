"""Syntax trees, each made once and walked quickly: a test that looks at the whole package has a million nodes."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def uncollected() -> Iterator[None]:
    """Looks for no garbage meanwhile: what is made is kept, and it would be looked through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def parsed(text: str) -> ast.Module:
    """Returns the tree of a module's text."""
    with uncollected():
        return ast.parse(text)


def walk(tree: ast.AST) -> list[ast.AST]:
    """Returns the nodes of `ast.walk` in its order, but for the contexts of names (`ast.Load`)."""
    nodes = [tree]
    for node in nodes:
        for field in () if isinstance(node, (ast.Name, ast.Constant)) else node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)
    return nodes


@cache
def nodes_of(module: ast.Module) -> list[ast.AST]:
    """`walk` of a whole module, kept."""
    return walk(module)
