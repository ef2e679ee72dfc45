"""Measures the house: files, lines, names, classes, imports and prose, of one or more trees side by side.

python tools/house.py                          # this tree, beside what is wanted
python tools/house.py 0915449 . --markdown     # a commit and this tree, as a markdown table
python tools/house.py 0915449 --run            # with the files that one step and reading a recipe enter there
python tools/house.py --names                  # every refused name that is declared, by file and line
python tools/house.py --prose what             # every line of prose with that word
python tools/house.py --entered step           # every file that one step enters, and its functions that run

A tree is a folder or a commit (which is unpacked into a temporary folder). But for --run nothing of it is imported.
This tree's own dynamic figures are always taken; those of other trees only with --run, as they start processes.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Words that stand for a noun. As a whole name, leading and trailing underscores apart, they count in the share of
# identifiers; as a part of a declared name, between underscores or capitals, tests/test_names.py refuses them.
_PRONOUNS = """
    place places part parts found own given whole what word words where mine said says say told one many seen kept
    made wanted amiss apart ahead behind beside besides owed noticed lent lend dealt again whose theirs somebody
    others taken asked held some several who
"""
PRONOUNS = frozenset(_PRONOUNS.split())
LONG_LOCAL = 3  # lines from a local's first store to its last use: a shorter life explains the name by itself
PROSE = {
    "what": r"\bwhat\b",
    "who, whose, nobody": r"\b(?:who|whose|nobody)\b",
    "those of, that of": r"\b(?:those|that) of\b",
    "told, said, hears": r"\b(?:told|said|hears)\b",
    "of its own": r"\bof its own\b",
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b",
}
HIGHEST_PROSE = {  # per 10,000 words, the highest of seven code bases of the field (twice as many are wanted at most)
    "what": 2.2,
    "who, whose, nobody": 6.5,
    "those of, that of": 0.6,
    "told, said, hears": 0.2,
    "of its own": 0.0,
    "beside": 0.0,
    "behind": 0.8,
}
# The rooms of the house that is wanted: budget in lines, and the files that belong there, as long as they stand
# elsewhere, too. The first room that claims a file has it.
ROOMS: dict[str, tuple[int, str]] = {
    "ground": (1000, (
        "__init__.py __main__.py errors.py units.py scores.py batch.py version.py unpickle.py text.py "
        "digests.py tensors.py files.py figures.py adjoint.py kernel_kills.py"
    )),
    "recipe": (2950, "recipe/* part/*"),
    "coming_from": (2450, "coming_from/*"),
    "mesh": (870, (
        "mesh/__init__.py mesh/copies.py mesh/degrees.py mesh/device.py mesh/mesh.py "
        "mesh/engine.py"
    )),
    "host_comm": (750, "host_comm/* mesh/*"),
    "gloo": (1450, "gloo/*"),
    "data": (2400, "data/*"),
    "strategies/_rounds": (1070, (
        "strategies/_rounds/* strategies/local_sgd* train/rounds.py train/ledger.py"
    )),
    "strategies/async_average": (290, "strategies/async_average/*"),
    "strategies/parameter_server": (900, (
        "strategies/parameter_server/* launch/rank_launcher.py launch/lost.py"
    )),
    "strategies/branches": (900, "strategies/branches/*"),
    "strategies/replicas": (430, "strategies/replicas/*"),
    "strategies": (1000, "strategies/*"),
    "axes": (3400, "axes/*"),
    "learner": (1200, "learner/*"),
    "exchange": (2000, "exchange/*"),
    "checks": (600, "checks/*"),
    "model": (950, "model/*"),
    "updates": (400, "core/updates.py"),
    "core": (3300, "core/*"),
    "identity": (1000, "identity/* train/overrides.py"),
    "weights": (1500, (
        "weights/* extras/weights/* checkpoint/pickled.py checkpoint/other_names.py checkpoint/source.py "
        "checkpoint/matching.py checkpoint/peft.py assembly/initial.py launch/initial.py adapters/*"
    )),
    "memory_copies": (480, "checkpoint/node_copies.py callbacks/memory_checkpoint.py"),
    "checkpoint": (1900, "checkpoint/*"),
    "guard": (560, (
        "guard/* train/judge.py train/refusals.py train/blame.py"
    )),
    "why": (900, (
        "why/* extras/why/* train/measurements.py train/processors.py plan/changes.py "
        "plan/rank_times.py plan/measured.py"
    )),
    "goodput": (170, "plan/goodput.py"),
    "scale": (1600, (
        "doctor/probe* plan/probe.py plan/scaling.py plan/published_scaling.py verbs/scale* cli/scale.py"
    )),
    "verbs": (1680, "verbs/* export/*"),
    "cluster": (400, "cluster/*"),
    "sweep": (1300, "sweep/*"),
    "ray": (450, "ray/*"),
    "certificate": (600, "certificate/* proof/certified.py proof/retrain.py"),
    "assembly": (800, "assembly/* train/run.py"),
    "gallery": (450, "train/gallery.py callbacks/_gallery.py callbacks/samples.py"),
    "train": (1700, "train/*"),
    "plan": (1250, "plan/*"),
    "cli": (850, "cli/*"),
    "report": (1750, "report/* callbacks/report.py"),
    "trackers": (450, "callbacks/_tracker.py callbacks/trackio.py callbacks/swanlab.py"),
    "dashboard": (1150, (
        "dashboard/* extras/dashboard/* callbacks/dashboard/* "
        "callbacks/_exchange_timeline.py callbacks/timeline.py callbacks/tensorboard.py"
    )),
    "callbacks": (1300, "callbacks/*"),
    "plug-ins": (2600, (
        "losses/* metrics/* optimizers/* schedules/* datasets/*"
    )),
    "job_memory": (145, "launch/memory.py"),
    "launch": (4900, "launch/*"),
    "doctor": (560, "doctor/*"),
    "proof": (3100, "proof/*"),
    "audit": (2350, "audit/*"),
}  # fmt: skip
# Rooms that the core does without: the family, the outer houses and the extras.
_OUTSIDE_CORE = """
    strategies/async_average strategies/_rounds strategies/parameter_server strategies/branches strategies/replicas
    launch job_memory doctor proof certificate audit why scale verbs weights dashboard trackers report sweep ray
"""
OUTSIDE_CORE = frozenset(_OUTSIDE_CORE.split())
# Of one step the files of these are counted apart: how many there are depends on the recipe.
PARTS_OF_RECIPE = ("data", "datasets", "losses", "metrics", "optimizers", "schedules", "callbacks")

Import = tuple[
    str, int, str
]  # the imported module, the line, and when: "now", "later" (in a function) or "typing"
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
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from imports(child, package, "typing")
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, package, "later" if function else when)


def import_base(node: ast.ImportFrom, package: str) -> str:
    """Returns the absolute module of a `from … import`."""
    levels = package.split(".")
    base = levels[: len(levels) + 1 - node.level] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


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
    for node in ast.walk(tree):
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
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, "function"
            yield from ((arg.lineno, arg.arg, "parameter") for arg in _parameters(node.args))
            yield from _long_locals(node)
        elif isinstance(node, ast.ClassDef):
            yield node.lineno, node.name, "class"
            for field in node.body:
                for target in _targets(field):
                    yield target.lineno, target.id, "field"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, "attribute"
    for statement in tree.body:
        for target in _targets(statement):
            yield target.lineno, target.id, "constant"


def _parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    yield from (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    yield from (star for star in (arguments.vararg, arguments.kwarg) if star is not None)


def _targets(statement: ast.stmt) -> Iterator[ast.Name]:
    targets: Sequence[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        yield from (node for node in ast.walk(target) if isinstance(node, ast.Name))


def _long_locals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    lines: dict[str, list[int]] = {}
    stored = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            lines.setdefault(node.id, []).append(node.lineno)
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
    for name in stored:
        first, last = min(lines[name]), max(lines[name])
        if last - first > LONG_LOCAL:
            yield first, name, "local"


@dataclass(frozen=True)
class Tree:
    """A folder with the package `paddle_dp`, its models and its tests, read once."""

    root: Path
    name: str

    @cached_property
    def source(self) -> dict[str, ast.Module]:
        """The package's modules by their path below its folder."""
        package = self.root / "paddle_dp"
        return {
            file.relative_to(package).as_posix(): ast.parse(file.read_text())
            for file in sorted(package.rglob("*.py"))
        }

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines of each file of the package."""
        package = self.root / "paddle_dp"
        return {f.relative_to(package).as_posix(): _lines(f) for f in sorted(package.rglob("*.py"))}

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
            names = (name for name, _, _ in imports(ast.parse(file.read_text()), package))
            loaded = {name if name in modules else name.rpartition(".")[0] for name in names}
            graph[module] = loaded & set(modules) - {module}
        return graph

    @cached_property
    def classes(self) -> dict[ClassId, ast.ClassDef]:
        return {
            (module_of(file), node.name): node
            for file, tree in self.source.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

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
            for node in ast.walk(tree):
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


def _lines(file: Path) -> int:
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
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = 0

    def visit(module: str) -> None:
        nonlocal groups
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in graph[module]:
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            size = len(stack) - stack.index(module)
            del stack[-size:]
            groups += size > 1

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 5 * len(graph)))
    for module in graph:
        if module not in index:
            visit(module)
    return groups


def double_classes(tree: Tree) -> dict[str, list[str]]:
    """Class names that more than one module declares. `Config` is every plug-in's, by contract."""
    modules: dict[str, list[str]] = {}
    for module, name in tree.classes:
        modules.setdefault(name, []).append(module)
    return {
        name: sorted(where) for name, where in sorted(modules.items()) if len(where) > 1 and name != "Config"
    }


def room_of(file: str) -> str:
    """Returns the room of DESIGN's tree to which a file of the package belongs."""
    for room, (_, patterns) in ROOMS.items():
        if any(fnmatch(file, pattern) for pattern in patterns.split()):
            return room
    return "no room"


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
            names = (
                [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
            )
            names += [target.id for target in _targets(node)]
            count += sum(not name.startswith("_") for name in names)
    return count


def words_per_10000(tree: Tree) -> tuple[int, dict[str, float]]:
    """Returns the number of words of prose, and how often each of PROSE stands in 10,000 of them."""
    total, hits = 0, Counter[str]()
    for _, _, text in tree.prose():
        total += len(re.findall(r"[A-Za-z][A-Za-z'’]*", text))
        for word, pattern in PROSE.items():
            hits[word] += len(re.findall(pattern, text, re.IGNORECASE))
    return total, {word: 1e4 * hits[word] / max(total, 1) for word in PROSE}


# What is entered at run time -----------------------------------------------------------------------------------------

RECIPE = """
model: {use: mlp, inputs: 64, hidden: [8], classes: 4}
dataset: {use: random_images, shape: [1, 8, 8], classes: 4, samples: 64, test_samples: 8}
loss: {use: cross_entropy}
optimizer: {use: sgd, clip: 1.0}
schedule: {use: constant, learning_rate: 0.1}
strategy: {use: data_parallel}
train: {length: 8 steps, batch: 8, seed: 1}
callbacks: []
"""


Functions = dict[str, list[str]]  # by file


class Entered:
    """Collects the package's functions that this thread enters, but for those that an import runs."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, bool] = {}
        self._package = str(Path(sys.modules["paddle_dp"].__file__ or "").parent) + "/"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counts = event == "call" and code.co_flags & CO_OPTIMIZED and not self._codes.get(code)
        if counts and code.co_filename.startswith(self._package):
            self._codes[code] = not _is_importing(frame)

    @property
    def functions(self) -> Functions:
        """The functions by file, in the order of their first call; without comprehensions and lambdas."""
        result: Functions = {}
        for code in [code for code, counts in self._codes.items() if counts]:
            names = result.setdefault(code.co_filename.removeprefix(self._package), [])
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            if "<" not in name.rpartition(".")[2]:
                names.append(name.replace(".<locals>", ""))
        return result


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def step_functions(folder: str) -> Functions:
    """Runs in each of two ranks. Returns the functions entered between the callbacks of two successive steps."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train import Callback

    path = Path(folder) / "recipe.yaml"
    path.write_text(RECIPE)
    trainer = build(read_recipe(path, [f"output_dir={folder}"]), join(seed=1))
    entered = Entered()

    class Span(Callback):
        """Begins behind step 5, when all that only the first steps do is done."""

        def step(self, moment: Any) -> None:
            steps.append(1)
            sys.setprofile(entered if len(steps) == 5 else None)

    steps: list[int] = []
    trainer.add(Span())
    trainer.fit("8 steps")
    return entered.functions


def recipe_functions(recipe: str) -> None:
    """Prints the functions that `paddle-dp train RECIPE` enters until `read_recipe` has returned, and ends."""
    from paddle_dp.cli import main

    entered = Entered()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        entered(frame, event, argument)
        if event == "return" and frame.f_code.co_name == "read_recipe" and argument is not None:
            sys.setprofile(None)
            print(json.dumps(entered.functions), flush=True)
            import os

            os._exit(0)  # no rank is started: the rest is the launcher's

    sys.argv = ["paddle-dp", "train", recipe]
    sys.setprofile(profile)
    main()


def entered_functions(root: Path, kind: str) -> Functions:
    """Runs a step or reads a recipe (`kind`) with the package of a tree: the functions that it enters, by file."""
    script = root / "tools" / "house.py"
    if not script.exists() or not script.samefile(__file__):
        script.parent.mkdir(exist_ok=True)
        script.write_text(Path(__file__).read_text())
    run = subprocess.run(
        [sys.executable, str(script), "--enter", kind], cwd=root, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{root}: the files of one {kind} could not be counted:\n{run.stderr[-3000:]}")
    functions: Functions = json.loads(run.stdout.splitlines()[-1])
    return functions


def enter(kind: str) -> None:
    """Prints the functions entered by one step or by reading a recipe, with the tree in which this script lies."""
    import paddle_dp

    assert str(ROOT) in str(paddle_dp.__file__), f"{paddle_dp.__file__} is not of {ROOT}"
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        if kind == "recipe":
            path = Path(folder) / "recipe.yaml"
            path.write_text(RECIPE)
            recipe_functions(str(path))
        else:
            import tools.house
            from tests.ranks import run_ranks

            first, *others = run_ranks(tools.house.step_functions, 2, folder)
            for file, names in (pair for functions in others for pair in functions.items()):
                first[file] = list(dict.fromkeys([*first.get(file, []), *names]))
            print(json.dumps(first))


# The table -----------------------------------------------------------------------------------------------------------

Figures = dict[str, tuple[str, str]]  # row → (figure, what is wanted)


def figures(tree: Tree, entered: Mapping[str, Functions] | None) -> Figures:
    """Returns all figures of a tree by the name of their row."""
    lines = sum(tree.lines.values())
    rooms = Counter[str]()
    for file, count in tree.lines.items():
        rooms[room_of(file)] += count
    core = sum(count for room, count in rooms.items() if room not in OUTSIDE_CORE)
    tests = [*(tree.root / "tests").rglob("*.py")]
    uses = [name for module in tree.source.values() for name in identifiers(module)]
    share = 100 * sum(map(is_pronoun, uses)) / max(len(uses), 1)
    learner = learner_shape(tree)
    deepest = max((tree.levels(key) for key in tree.classes), default=0)
    total, prose = words_per_10000(tree)
    by_subclass = Counter(name for names in learner.overridden.values() for name in names)
    overriding = ", ".join(f"{name} {count}" for name, count in by_subclass.most_common())
    outer = [file for file in entered["step"] if file.startswith(PARTS_OF_RECIPE)] if entered else []
    step = f"{len(entered['step']) - len(outer)}, and {len(outer)} of data and plug-ins" if entered else "–"
    rows: Figures = {
        "files, source": (f"{len(tree.source):,}", "≤ 380"),
        "lines, source": (f"{lines:,}", "≤ 52,000"),
        "lines, core": (f"{core:,}", "≤ 34,000"),
        "files, tests": (f"{len(tests):,}", ""),
        "lines, tests": (f"{sum(map(_lines, tests)):,}", "≤ 45,000"),
        "classes": (
            f"{sum(isinstance(n, ast.ClassDef) for t in tree.source.values() for n in ast.walk(t)):,}",
            "",
        ),
        "public names": (f"{public_names(tree):,}", ""),
        "pronouns among identifiers": (f"{share:.2f} %", "≤ 0.5 %"),
        "declared names with a pronoun": (f"{len(refused(tree)):,} of {len(tree.declared):,}", ""),
        "class names that exist twice": (f"{len(double_classes(tree))}", "0"),
        "methods of Learner": (f"{len(learner.methods)}", "≤ 30"),
        "… overridden by subclasses": (f"{len(learner.overridden)}", "≤ 10"),
        "… where": (overriding, ""),
        "levels of Learner": (f"{learner.levels}", "≤ 2"),
        "deepest inheritance": (f"{deepest}", ""),
        "import circles": (f"{circles(tree.graph)}", "0"),
        "files entered by one CPU step": (step, "≤ 14"),
        "files entered by reading a recipe": (f"{len(entered['recipe'])}" if entered else "–", ""),
        "words of prose": (f"{total:,}", ""),
        **{
            f'"{word}" per 10,000': (f"{figure:.1f}", f"≤ {2 * HIGHEST_PROSE[word]:.1f}")
            for word, figure in prose.items()
        },
        **{f"room {room}": (f"{rooms[room]:,}", f"≤ {budget:,}") for room, (budget, _) in ROOMS.items()},
    }
    if rooms["no room"]:
        rows["room unknown"] = (f"{rooms['no room']:,}", "0")
    return rows


def print_table(names: Sequence[str], columns: Sequence[Figures], markdown: bool) -> None:
    """Prints the columns side by side, and what is wanted last."""
    labels = list(dict.fromkeys(label for column in columns for label in column))
    goals = {label: goal for column in columns for label, (_, goal) in column.items()}
    head = ["", *names, "wanted"]
    body = [[label, *(c.get(label, ("–", ""))[0] for c in columns), goals[label]] for label in labels]
    if markdown:
        print("|", " | ".join(head), "|\n|---|" + "--:|" * (len(head) - 1))
        for row in body:
            print("|", " | ".join(row), "|")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*head)
    for row in body:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def unpack(commit: str, folder: Path) -> Path:
    """Unpacks a commit of this repository below `folder`."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{commit} is neither a folder nor a commit: {archive.stderr.decode().strip()}")
    target = folder / commit.replace("/", "-")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as file:
        file.extractall(target, filter="data")
    return target


@cache
def this_tree() -> Tree:
    return Tree(ROOT, "this tree")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="*", default=[], help="folders or commits; default: this tree")
    parser.add_argument("--markdown", action="store_true", help="print a markdown table")
    parser.add_argument(
        "--run", action="store_true", help="run a step and read a recipe with every tree, too"
    )
    parser.add_argument("--static", action="store_true", help="run nothing, not even with this tree")
    parser.add_argument("--names", action="store_true", help="print the refused names instead of the table")
    parser.add_argument(
        "--doubles", action="store_true", help="print the class names that exist twice instead"
    )
    parser.add_argument("--prose", choices=list(PROSE), help="print the lines with a word of prose instead")
    parser.add_argument(
        "--entered", choices=("step", "recipe"), help="print the files that it enters, and their functions"
    )
    parser.add_argument("--enter", choices=("step", "recipe"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.enter:
        enter(options.enter)
        return
    with tempfile.TemporaryDirectory(prefix="house-") as scratch:
        trees = [_tree(name, Path(scratch)) for name in options.trees] or [this_tree()]
        if options.names or options.doubles or options.prose or options.entered:
            _print_lists(trees, options)
            return
        columns = []
        for tree in trees:
            runs = options.run or (tree.root == ROOT and not options.static)
            entered = (
                {kind: entered_functions(tree.root, kind) for kind in ("step", "recipe")} if runs else None
            )
            columns.append(figures(tree, entered))
        print_table([tree.name for tree in trees], columns, options.markdown)


def _tree(name: str, scratch: Path) -> Tree:
    if Path(name).resolve() == ROOT:
        return this_tree()
    return Tree(Path(name).resolve() if Path(name).is_dir() else unpack(name, scratch), name)


def _print_entered(tree: Tree, kind: str) -> None:
    """Prints the files of a step (`apart`: they depend on the recipe) or of reading a recipe."""
    for file, functions in sorted(entered_functions(tree.root, kind).items()):
        apart = " (apart)" if kind == "step" and file.startswith(PARTS_OF_RECIPE) else ""
        print(f"{file}, {tree.lines[file]} lines{apart}: {', '.join(functions)}")


def _print_lists(trees: Iterable[Tree], options: argparse.Namespace) -> None:
    for tree in trees:
        if options.names:
            for file, line, name, kind in refused(tree):
                print(f"paddle_dp/{file}:{line}: {kind} {name}")
        if options.doubles:
            for name, modules in double_classes(tree).items():
                print(f"{name}: {', '.join(modules)}")
        if options.entered:
            _print_entered(tree, options.entered)
        if options.prose:
            for file, line, text in tree.prose():
                for found in re.finditer(PROSE[options.prose], text, re.IGNORECASE):
                    print(
                        f"paddle_dp/{file}:{line}: …{text[max(0, found.start() - 40) : found.end() + 40]!r}"
                    )


if __name__ == "__main__":
    main()
