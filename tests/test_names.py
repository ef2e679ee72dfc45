"""Names say what is inside, every package has a sign, every file a first sentence."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tools.declared_names import refused_words
from tools.source_tree import Declared, double_classes, refused, this_tree
from tools.syntax import parsed

ROOT = Path(__file__).resolve().parent.parent
NAMELESS = {"util", "utils", "common", "helper", "helpers", "misc"}

# Names with a pronoun that stay: (name, kind or "", packages or "") → reason.
EXCUSED: dict[tuple[str, str, str], str] = {
    ("place", "function", "strategies"): "the verb of placement: `strategy.place(task)` returns a learner",
    ("place", "function", "learner/task.py"): "the same in the contract",
    ("place_alone", "function", "strategies"): "the same on one process",
    ("held_out", "", "datasets"): "the recipe's word, as in the data sets of texts",
    ("one_cycle", "file", "schedules"): "the field's word for this schedule",
    ("in_place", "", ""): "`in place` is the field's word for an update without a copy",
    ("dropout_in_place", "", ""): "the same",
    ("Part", "class", "part"): "the shelf's noun: what a recipe names",
    ("part", "", "part recipe"): "the same",
    ("_PARTS", "constant", "part recipe"): "the same",
    ("PARTS", "constant", "part recipe"): "the same",
    ("read_part", "function", "part recipe"): "the same",
    ("part_name", "", "part recipe"): "the same",
}
# How many declared names still have a pronoun in them, by package. A number may only fall;
# `python tools/house.py --names` lists them.
NAMES_LEFT: dict[str, int] = {
    "audit": 3, "cli": 1, "datasets": 1, "doctor": 1, "ground": 2, "launch": 1, "core": 2, "axes": 1, "plan": 2,
    "proof": 2, "train": 1, "assembly": 1,
}  # fmt: skip
DOUBLE_CLASSES = 0  # `python tools/house.py --doubles` lists them; may only fall, too


def sources() -> list[Path]:
    return [*ROOT.glob("paddle_dp/**/*.py"), *ROOT.glob("models/**/*.py")]


def test_every_name_says_what_is_inside() -> None:
    names = {
        str(f.relative_to(ROOT)): {p.strip("_") for p in f.relative_to(ROOT).with_suffix("").parts}
        for f in sources()
    }
    nameless = [file for file, parts in names.items() if parts & NAMELESS]
    assert not nameless, f"name the subject, not its usefulness: {nameless}"


def test_every_room_has_a_sign_and_every_file_a_promise() -> None:
    unsigned = [str(f.relative_to(ROOT)) for f in sources() if not ast.get_docstring(parsed(f.read_text()))]
    folders = {f.parent for f in sources()}
    unsigned += [f"{d.relative_to(ROOT)}/__init__.py" for d in folders if not (d / "__init__.py").exists()]
    assert not unsigned, f"these say nothing of themselves: {unsigned}"
    short = [str(d.relative_to(ROOT)) for d in folders if sign(d).count(".") < 2]
    assert not short, (
        "the docstring of a folder's __init__.py has two sentences or more: what lives here, and which package to try "
        f"instead: {short}"
    )


def sign(folder: Path) -> str:
    return ast.get_docstring(parsed((folder / "__init__.py").read_text())) or ""


def test_no_new_name_is_a_pronoun() -> None:
    """Each package has as many names with a pronoun as NAMES_LEFT says: not one more, and not one fewer unnoticed."""
    rows = [row for row in refused(this_tree()) if not is_excused(row)]
    wrong = differences(Counter(package_of(row[0]) for row in rows), NAMES_LEFT)
    grown = {package for package, _ in wrong if NAMES_LEFT.get(package, 0) < count(rows, package)}
    names = [f"  {kind} {name}: {', '.join(sorted(refused_words(name)))} (paddle_dp/{file}:{line})"
             for file, line, name, kind in rows if package_of(file) in grown]  # fmt: skip
    assert not wrong, "\n".join(
        ["", *(said for _, said in wrong), "NAMES_LEFT, in this file, has the numbers.",
         "Name the thing, not its role in a sentence; among these are the new ones:" if names else "", *names]
    )  # fmt: skip


def count(rows: list[Declared], package: str) -> int:
    return sum(package_of(row[0]) == package for row in rows)


def test_no_new_class_name_exists_twice() -> None:
    """`Config` apart, which every plug-in has by contract."""
    double = double_classes(this_tree())
    listed = "\n".join(f"  {name}: {', '.join(modules)}" for name, modules in double.items())
    assert len(double) <= DOUBLE_CLASSES, (
        f"{len(double)} class names exist twice; one word, one class:\n{listed}"
    )
    assert len(double) == DOUBLE_CLASSES, f"only {len(double)} exist twice now: lower DOUBLE_CLASSES to that"


def test_every_excuse_is_needed() -> None:
    rows = refused(this_tree())
    spare = [excuse for excuse in EXCUSED if not any(excuses(excuse, row) for row in rows)]
    assert not spare, f"nothing has these names any more, or they need no excuse: {spare}"


def is_excused(row: Declared) -> bool:
    return any(excuses(excuse, row) for excuse in EXCUSED)


def excuses(excuse: tuple[str, str, str], row: Declared) -> bool:
    name, kind, folders = excuse
    file = row[0]
    inside = not folders or any(file == f or file.startswith(f"{f}/") for f in folders.split())
    return row[2] == name and kind in ("", row[3]) and inside


def package_of(file: str) -> str:
    """`exchange/choose.py` → `exchange`, `errors.py` → `ground`."""
    folders = Path(file).parent.as_posix().split("/")
    return "/".join(folders[: 2 if folders[0] in ("parallel", "strategies") else 1]).replace(".", "ground")


def differences(today: Counter[str], left: dict[str, int]) -> list[tuple[str, str]]:
    """Returns each package whose number differs from the table's, with a sentence that says what to do."""
    wrong = []
    for package in sorted({*today, *left}):
        now, before = today[package], left.get(package, 0)
        if now > before:
            wrong.append((package, f"{package}: {now} names with a pronoun, {before} are left to it"))
        elif now < before:
            wrong.append(
                (
                    package,
                    f"{package}: {now} names with a pronoun instead of {before}: lower its number to {now}",
                )
            )
    return wrong


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("param_index", set()),
        ("_of_place", {"of", "place"}),
        ("RankParts", {"parts"}),
        ("bucket_of", set()),
        ("PARTS", {"parts"}),
        ("onehot", set()),
        ("count_ahead", {"ahead"}),
    ],
)
def test_a_pronoun_is_seen_in_a_name(name: str, words: set[str]) -> None:
    assert refused_words(name) == words


def test_growth_and_decline_both_need_the_table() -> None:
    today, left = Counter({"data": 3, "mesh": 1, "plan": 2}), {"data": 2, "mesh": 1, "plan": 5, "cli": 1}
    assert [package for package, _ in differences(today, left)] == ["cli", "data", "plan"]
    assert "lower its number to 2" in differences(today, left)[2][1]
