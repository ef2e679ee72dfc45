"""Syntax trees, each made once and walked quickly: a test that looks at the whole package has a million nodes."""

from __future__ import annotations

import ast
import gc
from functools import cache


@cache
def parsed(text: str) -> ast.Module:
    """Returns the tree of a module's text. Nothing in it is garbage, so that none is looked for."""
    collected = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collected:
            gc.enable()


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
