"""The layering rule: who may import whom, and where paddle may be imported.

The rule stands in docs/map.md; here it is a table, and a breach is a sentence that says what to do.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.house.programs import ROOT, run_python
from tools.house import OUTSIDE_CORE, ROOMS, room_of
from tools.source_tree import Import, imports, this_tree
from tools.syntax import parsed

LAYERS: dict[str, float] = {
    "version": -1,  # imports nothing, so the package itself may load it
    "errors": 0, "units": 0, "unpickle": 0, "text": 0, "scores": 0, "tensors": 0, "files": 0, "adjoint": 0,
    "kernel_kills": 0,
    "batch": 0.5, "figures": 0.5,
    "part": 1, "mesh.degrees": 1, "mesh.allocation": 1, "mesh.environment": 1, "mesh.heartbeat": 1,
    "mesh.late_ranks": 1, "mesh.doors": 1, "mesh.secret": 1, "mesh.sockets": 1, "mesh.transport": 1,
    "recipe": 1.5, "plan": 1.5, "gloo": 1.5,  # a recipe is made of parts, a plan of degrees
    "mesh": 2, "coming_from": 2, "report": 2,
    # Describing objects is below what is learned, comparing trainings above it.
    "identity.walk": 2, "identity.parameters_within": 2, "identity.user_frames": 2,
    "data": 3, "checkpoint": 3, "core": 3,
    # From tensors to an update: the axes split a model, and the checks try the result.
    "exchange": 3.5, "model": 3.5, "learner": 4, "axes": 4.5, "checks": 5, "identity": 5.5,
    "train": 6, "certificate": 6.5, "assembly": 7, "verbs": 7.5, "export": 7.5,
    "launch": 8, "launch.initial": 8, "launch.batch_numbers": 8, "launch.memory": 8,
    "proof": 8.5, "audit": 8.5, "doctor": 8.5, "sweep": 8.5, "ray": 8.5, "cluster": 8.5,  # of jobs
    "cli": 9,
    "__main__": 10,
    "": 0,  # the package itself: its version, and words that are loaded when they are used
}  # fmt: skip
REACH: dict[str, float] = {  # the highest layer that may be imported, where it is not "every layer below mine"
    "optimizers": 3, "schedules": 3, "losses": 0, "metrics": 0, "strategies": 5, "adapters": 3,
    "datasets": 1,  # a mixture is made of parts
    "callbacks": 6, "models": -1,
    # A recipe's rank is inside the job; the rest of launch acts from outside, and reads what a job has saved.
    "launch": 1.5, "launch.recipe_rank": 7.5, "launch.resume": 3, "launch.initial": 3, "launch.memory": 3,
    "launch.batch_numbers": 7.5,
    "": -1,  # paddle_dp/__init__.py loads its words when they are used
}  # fmt: skip
SHELVES = (
    "adapters", "callbacks", "datasets", "losses", "metrics", "models", "optimizers", "schedules",
    "strategies",
)  # fmt: skip
# The lines that a room may have as long as its budget in tools/house.py is not kept. A number falls with simpler code;
# it rises by the lines of a new part or guard, and the commit says why.
LINES_TODAY: dict[str, int] = {
    "ground": 1359, "recipe": 4268, "coming_from": 2965, "mesh": 955, "host_comm": 1675, "data": 3141,
    "core": 5414, "learner": 1817, "axes": 4017, "strategies/async_average": 314, "strategies/replicas": 456,
    "strategies/_rounds": 1218, "strategies/parameter_server": 1451, "strategies/branches": 1055,
    "checks": 1044, "identity": 2054, "checkpoint": 2242, "why": 1159,
    "certificate": 1009, "assembly": 2378, "train": 2064, "plan": 3129, "cli": 1536, "dashboard": 1248,
    "callbacks": 1565, "model": 1275, "verbs": 2624, "plug-ins": 6578, "launch": 6138, "doctor": 1719, "proof": 4289,
    "audit": 2521, "ray": 478, "weights": 1552,
}  # fmt: skip
# The core does without the family of rare strategies, the outer houses and the extras. What it still imports of them,
# (module, module); rows may only go.
CORE_IMPORTS: set[tuple[str, str]] = {
    ("assembly.assemble", "certificate.certificate"), ("assembly.assemble", "assembly.initial"),
    ("assembly.trainer", "train.rounds"), ("assembly.trainer", "train.measurements"),
}  # fmt: skip
STDLIB_ONLY = (
    "errors",
    "units",
    "text",
    "files",
    "scores",
)  # and what a quantity needs to be a pydantic field
NO_PADDLE = (
    *STDLIB_ONLY,
    "part",
    "recipe",
    "coming_from",
    "report",
    "plan",
    "cli",
    "",
    *(s for s in SHELVES if s != "models"),
)


@cache
def sources() -> dict[str, Path]:
    """Every module of the package and of models/, by its dotted name."""
    files = [*ROOT.glob("paddle_dp/**/*.py"), *ROOT.glob("models/**/*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


@cache
def imports_of(module: str) -> list[Import]:
    file = sources()[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return list(imports(parsed(file.read_text()), package))


def package_of(module: str) -> str:
    """paddle_dp.mesh.degrees → mesh.degrees, paddle_dp.mesh.mesh.Mesh → mesh, models.mlp → models, paddle → paddle."""
    top, _, rest = module.partition(".")
    if top != "paddle_dp":
        return top
    longest = ".".join(rest.split(".")[:2])
    return longest if longest in LAYERS or longest in REACH else rest.split(".")[0]


def breach(importer: str, imported: str, when: str = "now") -> str | None:
    """What is wrong with `importer` importing `imported` (dotted module names), or None.

    An annotation may name a word of its own layer (a learner is *passed* a Batch), never one of a layer above. The
    package itself names its public words for type checkers, and loads none of them.
    """
    mine, theirs = package_of(importer), package_of(imported)
    if mine == "" and when == "typing":
        return None
    if imported.partition(".")[0] not in ("paddle_dp", "models"):
        if mine == "models" and theirs != "paddle" and theirs not in sys.stdlib_module_names:
            return f"models may import paddle only, not {theirs}. A model is plain Paddle; bring data in by a data set."
        if mine in STDLIB_ONLY and theirs not in {
            *sys.stdlib_module_names,
            "annotated_types",
            "pydantic_core",
        }:
            return f"{mine} may import the standard library only, not {theirs}: everything stands on it."
        return None
    if mine.split(".")[0] == theirs.split(".")[0] and mine != "":
        return None
    if theirs in SHELVES:
        return f"{mine} may not import the shelf {theirs}: part.py finds its files by name. Ask for a Part."
    if theirs not in LAYERS:
        return f"{mine} may not import {theirs}: test_layers.py knows no such package. Give it a layer in LAYERS."
    if mine not in LAYERS and mine not in REACH:
        return f"{mine} has no layer. Give it one in tests/test_layers.py and in docs/map.md."
    reach = REACH.get(mine, LAYERS.get(mine, 0) - 0.5)
    if LAYERS[theirs] <= reach:
        return None
    where = (
        "same layer"
        if LAYERS.get(mine) == LAYERS[theirs]
        else f"layer {LAYERS[theirs]:g}, it may import up to {reach:g}"
    )
    return f"{mine or '__init__'} may not import {theirs}: {where}. Move the shared word down, or pass it in."


@pytest.mark.parametrize(
    ("importer", "imported", "sentence"),
    [
        ("paddle_dp.data.loader", "paddle_dp.learner.learner", "data may not import learner: layer 4"),
        ("paddle_dp.mesh.mesh", "paddle_dp.data.Share", "mesh may not import data: layer 3"),
        ("paddle_dp.assembly.build", "paddle_dp.callbacks.console", "may not import the shelf callbacks"),
        ("paddle_dp.losses.contrastive", "paddle_dp.recipe.schema", "losses may not import recipe"),
        ("paddle_dp.launch.start", "paddle_dp.assembly.build", "launch may not import assembly"),
        ("models.mlp", "paddle_dp.errors", "models may not import errors"),
        ("models.mlp", "numpy", "models may import paddle only"),
        ("paddle_dp.units", "numpy", "units may import the standard library only"),
        ("paddle_dp.cli", "paddle_dp.attic.x", "knows no such package"),
        ("paddle_dp", "paddle_dp.mesh", "__init__ may not import mesh"),
        ("paddle_dp.launch.recipe_rank", "paddle_dp.assembly.build", None),
        ("paddle_dp.recipe.read", "paddle_dp.mesh.degrees", None),
        ("paddle_dp.callbacks.console", "paddle_dp.train", None),
        ("paddle_dp.optimizers.sgd", "paddle_dp.optimizers._clip", None),
    ],
)
def test_the_law_says(importer: str, imported: str, sentence: str | None) -> None:
    said = breach(importer, imported)
    assert (said is None) if sentence is None else (said is not None and sentence in said)


def test_imports_are_seen_wherever_they_stand() -> None:
    code = "import a\nfrom .. import b\nfrom .c import d\ndef f():\n  import e\nif TYPE_CHECKING:\n  from g import h\n"
    seen = [(name, when) for name, _, when in imports(ast.parse(code), "x.y")]
    assert seen == [("a", "now"), ("x.b", "now"), ("x.y.c.d", "now"), ("e", "later"), ("g.h", "typing")]


def test_every_import_keeps_the_law() -> None:
    breaches = [
        f"{sources()[module].relative_to(ROOT)}:{line}: {said}"
        for module in sources()
        for name, line, when in imports_of(module)
        if (said := breach(module, name, when))
    ]
    assert not breaches, "\n" + "\n".join(breaches)


def test_no_import_runs_in_a_circle() -> None:
    """Nor does an annotation, or an import inside a function: two modules that need each other are one subject."""
    edges = {m: {resolve(name) for name, _, _ in imports_of(m)} & set(sources()) - {m} for m in sources()}
    while free := [m for m, targets in edges.items() if not targets & set(edges)]:
        for module in free:
            del edges[module]
    assert not edges, (
        f"these import each other in a circle (or import one that does): {', '.join(sorted(edges))}"
    )


def room(module: str) -> str:
    """Returns the room of a module of the package; "" for one of models/."""
    file = sources()[module].relative_to(ROOT)
    return room_of(str(file.relative_to("paddle_dp"))) if file.parts[0] == "paddle_dp" else ""


def test_the_core_does_without_the_outer_houses() -> None:
    """Launcher, proof, audit, doctor, certificate, `why`, weights of other formats, verbs and rare strategies import
    the core, and it imports none of them. (`cli` is everybody's door.)"""
    outside = {m for m in sources() if room(m) in OUTSIDE_CORE}
    core = [
        m
        for m in sources()
        if m not in outside and room(m) not in ("", "cli") and package_of(m) != "__main__"
    ]
    climbs = {
        (m, target) for m in core for name, _, _ in imports_of(m) if (target := resolve(name)) in outside
    }
    short = {(m.removeprefix("paddle_dp."), target.removeprefix("paddle_dp.")) for m, target in climbs}
    assert short - CORE_IMPORTS == set(), "pass it in, as a callback, a hook or an argument"
    assert CORE_IMPORTS - short == set(), "these are gone: delete their rows"


def inside_strategy(module: str) -> bool:
    """Whether a module is in the folder of a strategy, whose `__init__` alone is read without Paddle."""
    return module.startswith("paddle_dp.strategies.") and module.count(".") == 3


def resolve(name: str) -> str:
    """The module that importing `name` loads: `paddle_dp.units.Length` → `paddle_dp.units`."""
    return name if name in sources() else name.rpartition(".")[0]


def test_paddle_waits_until_it_is_needed() -> None:
    early = [
        f"{sources()[m].relative_to(ROOT)}:{line}: {package_of(m)} is read without paddle: "
        "import it inside the function."
        for m in sources()
        for name, line, when in imports_of(m)
        if when == "now"
        and name.partition(".")[0] == "paddle"
        and (package_of(m) in NO_PADDLE or package_of(m) == "launch")
        and not inside_strategy(m)
    ]
    assert not early, "\n" + "\n".join(early)


def test_no_shelf_and_no_planning_pulls_paddle_in() -> None:
    """The same, seen from outside: a recipe's parts, and what they import at any depth, are read without it."""
    packages = {"launch", "mesh.degrees", *NO_PADDLE}
    light = sorted(m for m in sources() if package_of(m) in packages and not inside_strategy(m))
    # Whoever imports it before a rank starts would hand other OpenMP settings on, and wait for a second and a half.
    light.append("paddle_dp.proof")
    check = "importlib.import_module(m); assert 'paddle' not in sys.modules, m"
    code = f"import sys, importlib\nfor m in {light}: {check}"
    run_python("-c", code)


def test_every_room_keeps_to_its_lines() -> None:
    """A room has its budget, or today's lines where those are more."""
    lines = Counter[str]()
    for file, count in this_tree().lines.items():
        lines[room_of(file)] += count
    wrong = [
        f"{room} has {count} lines: {said}"
        for room, count in lines.items()
        if (said := over_budget(room, count))
    ]
    assert not wrong, "\n" + "\n".join(
        [*wrong, "budgets: tools/house.py, ROOMS; today's lines: LINES_TODAY, here"]
    )


def over_budget(room: str, lines: int) -> str | None:
    """Returns what to do about a room with this many lines, or None."""
    if room not in ROOMS:
        return "no room of tools/house.py claims its files. Add them to one, or a room with a budget"
    budget, today = ROOMS[room][0], LINES_TODAY.get(room)
    if lines > (limit := max(budget, today or 0)):
        return (
            f"it may have {limit}. Make it smaller, or, for a new part, raise its number (for a strategy's folder: "
            "add a row to ROOMS) and say in the commit why"
        )
    if today is not None and lines <= budget:
        return f"its budget of {budget} is kept now. Delete its row from LINES_TODAY"
    if today is not None and today - lines > 100:
        return f"LINES_TODAY still allows {today}. Lower that to {lines}"
    return None


def test_a_room_that_grows_and_one_that_shrank_are_named() -> None:
    room, today = next(iter(LINES_TODAY.items()))
    assert over_budget(room, today) is None
    assert "Make it smaller" in str(over_budget(room, today + 1))
    assert (
        f"Lower that to {today - 200}" in str(over_budget(room, today - 200)) or today - 200 <= ROOMS[room][0]
    )
    assert "Delete its row" in str(over_budget(room, ROOMS[room][0]))
    assert "no room" in str(over_budget("no room", 1))
