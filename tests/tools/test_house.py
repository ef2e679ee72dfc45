"""tools/house.py: what it counts, in a package of three files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.declared_names import declarations, identifiers, is_pronoun
from tools.house import family_branches, room_of
from tools.source_tree import (
    Tree,
    circles,
    double_classes,
    learner_shape,
    public_names,
    this_tree,
    words_per_10000,
)

BASE = '''"""Two words."""
from dataclasses import dataclass
class Model:
    def save(self): ...
class Learner(Model):
    def step(self): ...
    def finish(self): ...
'''
BELOW = '''"""What a rank computes, and what it sends."""
from paddle_dp.core.learner import Learner as Base
LIMIT = 3
class Sharded(Base):
    def step(self):
        raise ValueError("what is this, and whose")  # what for
class Deep(Sharded):
    def save(self): ...
def _hidden(): ...
'''


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for name, text in {
        "core/learner": BASE,
        "exchange/ways": BELOW,
        "plan/model": "class Model: ...\n",
    }.items():
        file = tmp_path / "paddle_dp" / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return Tree(tmp_path, "a tree")


def test_learner_has_what_it_inherits_and_is_overridden_at_any_depth(tree: Tree) -> None:
    shape = learner_shape(tree)
    assert shape.methods == {"save", "step", "finish"}
    assert shape.overridden == {"step": ["Sharded"], "save": ["Deep"]}
    assert shape.levels == 4


def test_names_are_counted_once_each(tree: Tree) -> None:
    assert double_classes(tree) == {"Model": ["paddle_dp.core.learner", "paddle_dp.plan.model"]}
    assert public_names(tree) == 6  # two classes below core, LIMIT and two below exchange, one below plan
    assert tree.lines == {"core/learner.py": 7, "exchange/ways.py": 9, "plan/model.py": 1}
    assert [room_of(file) for file in tree.lines] == ["core", "exchange", "plan"]


def test_prose_is_docstrings_comments_and_messages(tree: Tree) -> None:
    words, rates = words_per_10000(tree)
    assert words == 8 + 5 + 2  # "Two words." is no sentence
    assert rates["what"] == pytest.approx(1e4 * 4 / words)
    assert rates["who, whose, nobody"] == pytest.approx(1e4 / words)


FAMILY = """
def f(plan, servers):
    if plan.servers_here and plan.devices or servers > 1:
        print("servers")
    use = [n for n in plan if n != "local_sgd"]
    assert not isinstance(plan, BranchLayout)
    return plan.observers if plan.kind == "a sentence on servers" else plan.servers
"""


def test_a_branch_on_the_family_is_a_line_of_a_condition_outside_its_rooms(tmp_path: Path) -> None:
    for file in ("plan/sizes", "strategies/branches/sizes", "launch/rank_launcher"):
        (tmp_path / f"paddle_dp/{file}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"paddle_dp/{file}.py").write_text(FAMILY)
    assert family_branches(Tree(tmp_path, "a tree")) == {
        ("plan/sizes.py", 3): {"servers_here", "servers"},
        ("plan/sizes.py", 5): {"local_sgd"},
        ("plan/sizes.py", 6): {"BranchLayout"},
    }


def test_branches_on_the_family_s_words_stay_few() -> None:
    """Decision 0034 has the reason of each."""
    assert {(file, *words) for (file, _), words in family_branches(this_tree()).items()} == {
        ("exchange/choose.py", "compressed"), ("launch/command.py", "servers_here"),
        ("launch/plan.py", "servers_here"), ("mesh/degrees.py", "server"), ("mesh/mesh.py", "servers"),
    }, "ask the strategy, its layout, the degrees or the mesh instead"  # fmt: skip


def test_circles_are_groups() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == 0
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"e"}, "e": {"c", "a"}}) == 2


def test_a_pronoun_is_a_whole_name_in_the_share() -> None:
    uses = [
        *identifiers(ast.parse("def f(place, *, own=1): return g(found=_where.one, _of_all=place_count)"))
    ]
    assert {name for name in uses if is_pronoun(name)} == {
        "place", "own", "found", "one", "_where", "_of_all",
    }  # fmt: skip


def test_a_local_is_declared_when_it_lives_long() -> None:
    short = "def f(x):\n    a = x\n    return a\n"
    long = "def f(x):\n    a = x\n    x()\n    x()\n    x()\n    return a\n"
    assert not [row for row in declarations(ast.parse(short)) if row[2] == "local"]
    assert (2, "a", "local") in declarations(ast.parse(long))
