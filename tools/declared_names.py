"""The names of a module: which it declares, which it uses, and which of them have a pronoun in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tools.syntax import nodes_of, walk

# Words that stand for a noun. As a whole name, leading and trailing underscores apart, they count in the share of
# identifiers; as a part of a declared name, between underscores or capitals, tests/test_names.py refuses them.
_PRONOUNS = """
    place places part parts found own given whole what word words where mine said says say told one many seen kept
    made wanted amiss apart ahead behind beside besides owed noticed lent lend dealt again whose theirs somebody
    others taken asked held some several who
"""
PRONOUNS = frozenset(_PRONOUNS.split())
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)  # a union is made anew at each node
LONG_LOCAL = 3  # lines from a local's first store to its last use: a shorter life explains the name by itself


def name_words(name: str) -> set[str]:
    """`RankParts` and `_rank_parts` → {"rank", "parts"}; a constant's capitals are one word."""
    spaced = name if name.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(filter(None, spaced.lower().split("_")))


def refused_words(name: str) -> set[str]:
    """Returns the pronouns in a name; `of` counts as the first word only (`bucket_of` names a mapping)."""
    first = name.strip("_").lower().partition("_")[0]
    return name_words(name) & PRONOUNS | ({"of"} if first == "of" else set())


def is_pronoun(name: str) -> bool:
    bare = name.strip("_").lower()
    return bare in PRONOUNS or bare == "of" or bare.startswith("of_")


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Yields each use of an identifier: names, attributes, parameters, keywords, definitions and imported names."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).rpartition(".")[2]


def declarations(tree: ast.Module) -> set[tuple[int, str, str]]:
    """Returns (line, name, kind) of all that a module declares; locals only if they live for more than 3 lines."""
    return set(_declarations(tree))


def _declarations(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    for node in nodes_of(tree):
        if isinstance(node, FUNCTION):
            yield node.lineno, node.name, "function"
            yield from ((arg.lineno, arg.arg, "parameter") for arg in _parameters(node.args))
            yield from _long_locals(node)
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, "class"
            for field in node.body:
                for target in assigned_names(field):
                    yield target.lineno, target.id, "field"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, "attribute"
    for statement in tree.body:
        for target in assigned_names(statement):
            yield target.lineno, target.id, "constant"


def _parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (star for star in (arguments.vararg, arguments.kwarg) if star is not None)


def assigned_names(statement: ast.stmt) -> Iterator[ast.Name]:
    targets: Sequence[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        yield from (node for node in walk(target) if isinstance(node, ast.Name))


def _long_locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    lines: dict[str, list[int]] = {}
    stored = set()
    for node in walk(function):
        if isinstance(node, ast.Name):
            lines.setdefault(node.id, []).append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
    for name in stored:
        first, last = min(lines[name]), max(lines[name])
        if last - first > LONG_LOCAL:
            yield first, name, "local"
