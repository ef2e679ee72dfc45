"""A tree of the package, read once: its lines, classes, imports, declared names and prose, and counts of them."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tools.declared_names import assigned_names, declarations, refused_words
from tools.syntax import nodes_of, parsed, uncollected, walk

ROOT = Path(__file__).resolve().parents[1]
# Patterns, and how often each stands in 10,000 words of the highest of seven code bases of the field; twice as often is
# wanted at most.
PROSE = {
    "what": (r"\bwhat\b", 2.2),
    "who, whose, nobody": (r"\b(?:who|whose|nobody)\b", 6.5),
    "those of, that of": (r"\b(?:those|that) of\b", 0.6),
    "told, said, hears": (r"\b(?:told|said|hears)\b", 0.2),
    "of its own": (r"\bof its own\b", 0.0),
    "beside": (r"\bbeside\b", 0.0),
    "behind": (r"\bbehind\b", 0.8),
}

# The imported module, the line, and when: "now", "later" (in a function) or "typing".
Import = tuple[str, int, str]
Declared = tuple[str, int, str, str]  # file (from the package's folder), line, name, kind
ClassId = tuple[str, str]  # module and name


def imports(node: ast.AST, package: str, when: str = "now") -> Iterator[Import]:
    """Yields what code imports: when it is imported itself, later in its functions, or for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = import_base(child, package)
            yield from ((f"{base}.{alias.name}", child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.If) and any(map(_names_type_checking, walk(child.test))):
            yield from imports(child, package, "typing")
        elif not isinstance(child, ast.expr):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, package, "later" if function else when)


def _names_type_checking(node: ast.AST) -> bool:
    return "TYPE_CHECKING" in (getattr(node, "id", ""), getattr(node, "attr", ""))


def import_base(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute module of a `from … import`."""
    levels = package.split(".")
    base = levels[: len(levels) + 1 - node.level] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Tree:
    """A folder with the package `paddle_dp`, its models and its tests, read once."""

    root: Path
    name: str

    @cached_property
    def source(self) -> dict[str, ast.Module]:
        """The package's modules by their path below its folder."""
        with uncollected():
            return {name: parsed(file.read_text()) for name, file in self._files}

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines of each file of the package."""
        return {name: line_count(file) for name, file in self._files}

    @property
    def _files(self) -> list[tuple[str, Path]]:
        package = self.root / "paddle_dp"
        return [(file.relative_to(package).as_posix(), file) for file in sorted(package.rglob("*.py"))]

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        """The modules that each module of the package and of models/ imports, however and whenever."""
        files = [*self.root.glob("paddle_dp/**/*.py"), *self.root.glob("models/**/*.py")]
        modules = {
            ".".join(f.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__"): f
            for f in files
        }
        graph = {}
        for module, file in modules.items():
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            names = (name for name, _, _ in imports(parsed(file.read_text()), package))
            loaded = {name if name in modules else name.rpartition(".")[0] for name in names}
            graph[module] = loaded & set(modules) - {module}
        return graph

    @cached_property
    def classes(self) -> dict[ClassId, ast.ClassDef]:
        nodes = ((module_of(file), node) for file, tree in self.source.items() for node in nodes_of(tree))
        return {(module, node.name): node for module, node in nodes if isinstance(node, ast.ClassDef)}

    @cached_property
    def bases(self) -> dict[ClassId, list[ClassId]]:
        """The package's classes that each of its classes inherits from."""
        return {
            key: [base for node_base in node.bases if (base := self._find_class(key[0], node_base))]
            for key, node in self.classes.items()
        }

    def _find_class(self, module: str, base: ast.expr) -> ClassId | None:
        if isinstance(base, ast.Subscript):
            base = base.value
        if isinstance(base, ast.Attribute):
            same = [key for key in self.classes if key[1] == base.attr]
            return same[0] if len(same) == 1 else None
        return self._resolve(module, base.id) if isinstance(base, ast.Name) else None

    def _resolve(self, module: str, name: str) -> ClassId | None:
        for _ in range(10):  # through modules that import a name to export it
            if (module, name) in self.classes:
                return module, name
            step = self._imported.get((module, name))
            if step is None:
                return None
            module, name = step
        return None

    @cached_property
    def _imported(self) -> dict[tuple[str, str], tuple[str, str]]:
        table = {}
        for file, tree in self.source.items():
            module = module_of(file)
            package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
            for node in nodes_of(tree):
                if isinstance(node, ast.ImportFrom):
                    base = import_base(node, package)
                    for alias in node.names:
                        table[(module, alias.asname or alias.name)] = (base, alias.name)
        return table

    def ancestors(self, key: ClassId) -> set[ClassId]:
        return {key}.union(*(self.ancestors(base) for base in self.bases[key]))

    def levels(self, key: ClassId) -> int:
        return 1 + max((self.levels(base) for base in self.bases[key]), default=0)

    @cached_property
    def declared(self) -> list[Declared]:
        """All that the package declares, files apart from `__init__` and `__main__` included."""
        rows = []
        for file, tree in self.source.items():
            rows += [(file, line, name, kind) for line, name, kind in sorted(declarations(tree))]
            rows += [] if Path(file).stem.startswith("__") else [(file, 1, Path(file).stem, "file")]
        return rows

    def prose(self) -> Iterator[tuple[str, int, str]]:
        """Yields (file, line, text) of docstrings, comments and messages: strings with three words or more."""
        for file, tree in self.source.items():
            yield from ((file, line, text) for line, text in strings(tree))
            yield from ((file, line, text) for line, text in _comments(self.root / "paddle_dp" / file))


def line_count(file: Path) -> int:
    return len(file.read_bytes().splitlines())


def module_of(file: str) -> str:
    """`mesh/degrees.py` → `paddle_dp.mesh.degrees`."""
    dotted = ".".join(("paddle_dp", *Path(file).with_suffix("").parts))
    return dotted.removesuffix(".__init__")


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields prose in string literals; the literal pieces of an f-string are one text."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        text = ""
        if isinstance(node, ast.JoinedStr):
            pieces = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
            text = "".join(str(piece) for piece in pieces)
            pending += [v for v in node.values if not isinstance(v, ast.Constant)]
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            pending += ast.iter_child_nodes(node)
        if len(re.findall(r"[A-Za-z]+", text)) >= 3 and " " in text.strip():
            yield getattr(node, "lineno", 0), text


def _comments(file: Path) -> Iterator[tuple[int, str]]:
    with tokenize.open(file) as stream:
        for token in tokenize.generate_tokens(stream.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


def circles(graph: Mapping[str, set[str]]) -> int:
    """Returns the number of groups of modules that import each other (strongly connected components)."""
    reached = {module: _reached(graph, module) for module in graph}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sum(len(group) > 1 for group in groups)


def _reached(graph: Mapping[str, set[str]], module: str) -> set[str]:
    """A module, and all that it imports, directly or through others."""
    reached, pending = {module}, [module]
    while pending:
        pending += (new := graph[pending.pop()] - reached)
        reached |= new
    return reached


def double_classes(tree: Tree) -> dict[str, list[str]]:
    """Class names that more than one module declares. `Config` is every plug-in's, by contract."""
    modules: dict[str, list[str]] = {}
    for module, name in tree.classes:
        modules.setdefault(name, []).append(module)
    return {
        name: sorted(where) for name, where in sorted(modules.items()) if len(where) > 1 and name != "Config"
    }


def refused(tree: Tree, excuses: Mapping[str, str] = {}) -> list[Declared]:
    """Declared names with a pronoun in them, but for those that are excused."""
    return [row for row in tree.declared if row[2] not in excuses and refused_words(row[2])]


@dataclass(frozen=True)
class LearnerShape:
    """The class `Learner` with what it inherits, and the classes below it."""

    methods: set[str]
    overridden: dict[str, list[str]]  # method → the subclasses that override it
    levels: int  # from the highest ancestor to the lowest subclass


def learner_shape(tree: Tree) -> LearnerShape:
    key = next((key for key in tree.classes if key[1] == "Learner"), None)
    if key is None:
        return LearnerShape(set(), {}, 0)
    methods = set().union(*(_methods(tree.classes[c]) for c in tree.ancestors(key)))
    below = [c for c in tree.classes if c != key and key in tree.ancestors(c)]
    overridden: dict[str, list[str]] = {}
    for subclass in below:
        for method in _methods(tree.classes[subclass]) & methods:
            overridden.setdefault(method, []).append(subclass[1])
    return LearnerShape(methods, overridden, max(tree.levels(c) for c in [key, *below]))


def _methods(node: ast.ClassDef) -> set[str]:
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def public_names(tree: Tree) -> int:
    """Functions, classes and constants of modules that do not begin with an underscore."""
    count = 0
    for module in tree.source.values():
        for node in module.body:
            names = [target.id for target in assigned_names(node)]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.append(node.name)
            count += sum(not name.startswith("_") for name in names)
    return count


def words_per_10000(tree: Tree) -> tuple[int, dict[str, float]]:
    """Returns the number of words of prose, and how often each of PROSE stands in 10,000 of them."""
    total, hits = 0, Counter[str]()
    for _, _, text in tree.prose():
        total += len(re.findall(r"[A-Za-z][A-Za-z'’]*", text))
        for word, (pattern, _) in PROSE.items():
            hits[word] += len(re.findall(pattern, text, re.IGNORECASE))
    return total, {word: 1e4 * hits[word] / max(total, 1) for word in PROSE}


@cache
def this_tree() -> Tree:
    return Tree(ROOT, "this tree")
