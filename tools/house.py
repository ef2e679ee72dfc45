"""Measures the house: files, lines, names, classes, imports and prose, of one or more trees side by side.

python tools/house.py                          # this tree, beside what is wanted
python tools/house.py 0915449 . --markdown     # a commit and this tree, as a markdown table
python tools/house.py 0915449 --run            # with the files that one step and reading a recipe enter there
python tools/house.py --names                  # every refused name that is declared, by file and line
python tools/house.py --prose what             # every line of prose with that word
python tools/house.py --branches               # every branch on a rare strategy's words outside its folder
python tools/house.py --entered step           # every file that one step enters, and its functions that run

A tree is a folder or a commit (which is unpacked into a temporary folder). But for --run nothing of it is imported.
This tree's own dynamic figures are always taken; those of other trees only with --run, as they start processes.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import source_tree
from tools.command_line import parser_of
from tools.declared_names import identifiers, is_pronoun
from tools.entered_files import Functions, entered_functions
from tools.source_tree import PROSE, ROOT, Tree, refused, this_tree
from tools.syntax import nodes_of, walk

# The rooms of the house that is wanted: budget in lines, and the files that belong there, as long as they stand
# elsewhere, too. The first room that claims a file has it.
ROOMS: dict[str, tuple[int, str]] = {
    "ground": (1000, (
        "__init__.py __main__.py errors.py units.py scores.py batch.py version.py unpickle.py text.py "
        "digests.py tensors.py files.py figures.py adjoint.py kernel_kills.py"
    )),
    "recipe": (2950, "recipe/* part/*"),
    "coming_from": (2450, "coming_from/*"),
    "mesh": (870, "mesh/__init__.py mesh/copies.py mesh/degrees.py mesh/device.py mesh/mesh.py mesh/allocation.py"),
    "host_comm": (750, "host_comm/* mesh/*"),
    "gloo": (1350, "gloo/*"),
    "data": (2400, "data/*"),
    "strategies/_rounds": (1070, "strategies/_rounds/* strategies/local_sgd* train/rounds.py train/ledger.py"),
    "strategies/async_average": (290, "strategies/async_average/*"),
    "strategies/parameter_server": (900, "strategies/parameter_server/* launch/rank_launcher.py launch/lost.py"),
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
    "guard": (560, "guard/* train/judge.py train/refusals.py train/blame.py"),
    "why": (900, (
        "why/* extras/why/* train/measurements.py train/stragglers.py train/processors.py plan/changes.py "
        "plan/rank_times.py plan/measured.py"
    )),
    "goodput": (195, "plan/goodput.py"),
    "scale": (1600, "doctor/probe* plan/probe.py plan/scaling.py plan/published_scaling.py verbs/scale* cli/scale.py"),
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
    "plug-ins": (2600, "losses/* metrics/* optimizers/* schedules/* datasets/*"),
    "job_memory": (145, "launch/memory.py"),
    "launch": (4900, "launch/*"),
    "doctor": (560, "doctor/*"),
    "proof": (3100, "proof/*"),
    "audit": (2350, "audit/*"),
}  # fmt: skip
# Rooms that the core does without: the family, the outer houses and the extras.
_OUTSIDE_CORE = """
    strategies/async_average strategies/_rounds strategies/parameter_server strategies/branches strategies/replicas
    launch job_memory doctor proof certificate audit why scale verbs weights dashboard trackers report sweep ray cluster
"""
OUTSIDE_CORE = frozenset(_OUTSIDE_CORE.split())
# Words of the rare strategies and of compressed gradients, between underscores; and files where they mean others.
FAMILY_WORDS = re.compile(
    r"_(servers?|branch(es)?|local_sgd|async_average|averaged_every|averaged_states|parameter_server|power_sgd"
    r"|compress(ed|ion)?|replicas)(?=_)"
)
HOMONYMS = {  # data-parallel replicas, files in archives, the nodes' rendezvous
    "axes/*": "replicas", "exchange/bucketed_gradients.py": "replicas", "datasets/*": "compressed",
    "checkpoint/pickled.py": "compress", "launch/nodes/*": "server",
}  # fmt: skip
_TEXT: dict[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
# Of one step the files of these are counted apart: how many there are depends on the recipe.
PARTS_OF_RECIPE = ("data", "datasets", "losses", "metrics", "optimizers", "schedules", "callbacks")


FLAGS = {
    "--markdown": "print a markdown table",
    "--run": "run a step and read a recipe with every tree, too",
    "--static": "run nothing, not even with this tree",
    "--names": "print the refused names instead of the table",
    "--doubles": "print the class names that exist twice instead",
    "--branches": "print the branches on a family's words outside it instead",
}


def room_of(file: str) -> str:
    """Returns the room of DESIGN's tree to which a file of the package belongs."""
    for room, (_, patterns) in ROOMS.items():
        if any(fnmatch(file, pattern) for pattern in patterns.split()):
            return room
    return "no room"


def family_branches(tree: Tree) -> dict[tuple[str, int], set[str]]:
    """Returns the lines of conditions (file, line) with names or strings of the family outside its rooms, and these."""
    lines: dict[tuple[str, int], set[str]] = {}
    for file, module in tree.source.items():
        if room_of(file).startswith("strategies") or file == "exchange/compressed.py":
            continue
        homonyms = {word for pattern, word in HOMONYMS.items() if fnmatch(file, pattern)}
        for node in (node for parent in nodes_of(module) for test in _tests(parent) for node in walk(test)):
            if not isinstance(node, ast.Name | ast.Attribute | ast.Constant):
                continue
            text = str(getattr(node, _TEXT[type(node)]))
            spaced = f"_{'_'.join(re.findall(r'[A-Z]*[a-z0-9]+|[A-Z]+', text))}_".lower()
            if " " not in text and {match[1] for match in FAMILY_WORDS.finditer(spaced)} - homonyms:
                lines.setdefault((file, node.lineno), set()).add(text)
    return lines


def _tests(node: ast.AST) -> Sequence[ast.AST]:
    """Returns the conditions that a node of a module decides by."""
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            return [node.test]
        case ast.comprehension():
            return node.ifs
        case ast.BoolOp():
            return node.values
        case ast.Match():
            return [node.subject, *(case.pattern for case in node.cases)]
    return []


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
    learner = source_tree.learner_shape(tree)
    deepest = max((tree.levels(key) for key in tree.classes), default=0)
    classes = sum(isinstance(n, ast.ClassDef) for t in tree.source.values() for n in nodes_of(t))
    total, prose = source_tree.words_per_10000(tree)
    by_subclass = Counter(name for names in learner.overridden.values() for name in names)
    overriding = ", ".join(f"{name} {count}" for name, count in by_subclass.most_common())
    outer = [file for file in entered["step"] if file.startswith(PARTS_OF_RECIPE)] if entered else []
    step = f"{len(entered['step']) - len(outer)}, and {len(outer)} of data and plug-ins" if entered else "–"
    rows: Figures = {
        "files, source": (f"{len(tree.source):,}", "≤ 380"),
        "lines, source": (f"{lines:,}", "≤ 52,000"),
        "lines, core": (f"{core:,}", "≤ 34,000"),
        "files, tests": (f"{len(tests):,}", ""),
        "lines, tests": (f"{sum(map(source_tree.line_count, tests)):,}", "≤ 45,000"),
        "classes": (f"{classes:,}", ""),
        "public names": (f"{source_tree.public_names(tree):,}", ""),
        "pronouns among identifiers": (f"{share:.2f} %", "≤ 0.5 %"),
        "declared names with a pronoun": (f"{len(refused(tree)):,} of {len(tree.declared):,}", ""),
        "class names that exist twice": (f"{len(source_tree.double_classes(tree))}", "0"),
        "methods of Learner": (f"{len(learner.methods)}", "≤ 30"),
        "… overridden by subclasses": (f"{len(learner.overridden)}", "≤ 10"),
        "… where": (overriding, ""),
        "levels of Learner": (f"{learner.levels}", "≤ 2"),
        "deepest inheritance": (f"{deepest}", ""),
        "import circles": (f"{source_tree.circles(tree.graph)}", "0"),
        "branches on a family's words outside it": (f"{len(family_branches(tree))}", "0"),
        "files entered by one CPU step": (step, "≤ 14"),
        "files entered by reading a recipe": (f"{len(entered['recipe'])}" if entered else "–", ""),
        "words of prose": (f"{total:,}", ""),
        **{f'"{w}" per 10,000': (f"{figure:.1f}", f"≤ {2 * PROSE[w][1]:.1f}") for w, figure in prose.items()},
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("trees", nargs="*", default=[], help="folders or commits; default: this tree")
    for flag, meaning in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    parser.add_argument("--prose", choices=list(PROSE), help="print the lines with a word of prose instead")
    parser.add_argument(
        "--entered", choices=("step", "recipe"), help="print the files that it enters, and their functions"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="house-") as scratch:
        trees = [_tree(name, Path(scratch)) for name in options.trees] or [this_tree()]
        if options.names or options.doubles or options.branches or options.prose or options.entered:
            _print_lists(trees, options)
            return
        columns = []
        for tree in trees:
            runs = options.run or (tree.root == ROOT and not options.static)
            kinds = ("step", "recipe")
            entered = {kind: entered_functions(tree.root, kind) for kind in kinds} if runs else None
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


def _print_prose(tree: Tree, word: str) -> None:
    for file, line, text in tree.prose():
        for match in re.finditer(PROSE[word][0], text, re.IGNORECASE):
            print(f"paddle_dp/{file}:{line}: …{text[max(0, match.start() - 40) : match.end() + 40]!r}")


def _print_lists(trees: Iterable[Tree], options: argparse.Namespace) -> None:
    for tree in trees:
        if options.names:
            for file, line, name, kind in refused(tree):
                print(f"paddle_dp/{file}:{line}: {kind} {name}")
        if options.doubles:
            for name, modules in source_tree.double_classes(tree).items():
                print(f"{name}: {', '.join(modules)}")
        if options.branches:
            for (file, line), words in sorted(family_branches(tree).items()):
                print(f"paddle_dp/{file}:{line}: {', '.join(sorted(words))}")
        if options.entered:
            _print_entered(tree, options.entered)
        if options.prose:
            _print_prose(tree, options.prose)


if __name__ == "__main__":
    main()
