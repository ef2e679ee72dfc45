"""The tables of docs/coming-from/: each key of ours exists, and `paddle-dp check` answers each word that is marked."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddle_dp.cli import app
from paddle_dp.cli.app import command
from paddle_dp.errors import RecipeError
from paddle_dp.part import SHELVES, find, names
from paddle_dp.part.config import fields_of
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.recipe.schema import (
    Ema,
    EvaluationSettings,
    Guard,
    Load,
    LoaderSettings,
    Mix,
    WatchSettings,
)
from paddle_dp.recipe.train_schema import Train

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/coming-from"
PAGES = sorted(page for page in FOLDER.glob("*.md") if not page.name.startswith("README"))
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]
GROUPS = {
    "train": Train, "loader": LoaderSettings, "watch": WatchSettings, "guard": Guard, "ema": Ema, "mix": Mix,
    "evaluation": EvaluationSettings, "load": Load,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    page: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    marked: bool

    def __str__(self) -> str:
        return f"{self.page}: {', '.join(self.theirs)}"


def rows(page: Path) -> list[Row]:
    """The rows of the table with a column `hint` (提示 in Chinese)."""
    found, inside = [], False
    for line in page.read_text("utf-8").splitlines():
        cells = (
            [cell.strip() for cell in line.strip().strip("|").split(" | ")] if line.startswith("|") else []
        )
        if len(cells) == 4 and cells[2].strip("| ") in ("hint", "提示"):
            inside = True
        elif not cells:
            inside = False
        elif inside and set(line) - set("|- "):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            theirs, ours = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[:2])
            found.append(Row(page.name, theirs, ours, "✓" in cells[2]))
    return found


ALL = [row for page in PAGES for row in rows(page)]


@cache
def keys() -> set[str]:
    """Every key of a recipe."""
    known = {*Recipe.model_fields, "optimizer.groups", "dataset.reading"}
    known |= {f"{group}.{name}" for group, kind in GROUPS.items() for name in fields_of(kind)}
    for shelf, noun in SHELVES.items():
        known |= {f"{noun}.use"}
        for name in names(shelf):
            prefix = f"{shelf}.{name}" if shelf in ("metrics", "callbacks") else noun
            known |= {prefix, *(f"{prefix}.{field}" for field in fields_of(find(shelf, name)))}
    return known


@cache
def commands() -> dict[str, set[str]]:
    """The options of each command."""
    return {verb: {o for p in each.params for o in p.opts} for verb, each in command().commands.items()}


def key_of(word: str) -> str:
    """`--min-lr` and `Optimizer.lr.min_lr` as a key of a recipe: min_lr."""
    return word.lstrip("-").replace("-", "_").rpartition(".")[2]


def hint(word: str) -> str:
    """The answer of paddle-dp to another tool's word: an option, or a recipe's key."""
    if word.startswith("-") and (
        "_" in word or word in ("-c", "-o", "--gpus", "--rank", "--nnodes", "--ips")
    ):
        said = CliRunner().invoke(app, ["check", "x.yaml", word, "1"]).output
        return " ".join(re.sub("[│╭╮╰╯─]", " ", said).split())
    return answers()[key_of(word)]


@cache
def answers() -> dict[str, str]:
    """The answer to each key of the pages, from one reading of a recipe with all of them."""
    words = {key_of(word) for row in ALL for word in row.theirs if re.fullmatch(r"[\w.-]+", word)}
    with pytest.raises(RecipeError) as caught:
        read_recipe("configs/digits_mlp.yaml", [f"train.{word}=1" for word in sorted(words)])
    said = re.split(r"^override 'train\.(\w+)=1': ", str(caught.value), flags=re.M)
    return dict(zip(said[1::2], said[2::2], strict=True))


def test_every_page_has_its_table_and_its_twin() -> None:
    assert len(ENGLISH) == 6
    for page in ENGLISH:
        assert len(rows(page)) >= 25, page.name
        twin = page.with_name(f"{page.stem}.zh.md")
        assert [(r.theirs, r.ours, r.marked) for r in rows(page)] == [
            (r.theirs, r.ours, r.marked) for r in rows(twin)
        ], f"{twin.name} has other rows than {page.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short(page: Path) -> None:
    lines = page.read_text("utf-8").splitlines()
    longest = 600 if page.name.endswith(".zh.md") else 260  # a Chinese paragraph is one line
    assert len(lines) <= 150 and max(map(len, lines)) < longest


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_key_of_ours_exists(page: Path) -> None:
    from paddle_dp import Trainer, join

    known, options = keys(), commands()
    every_option = set().union(*options.values())
    assert callable(join) and "folder" in inspect.signature(Trainer.of).parameters
    for row in rows(page):
        for ours in row.ours:
            if ours.startswith("paddle-dp "):
                verb, *rest = ours.split()[1:]
                assert verb in options and {o for o in rest if o[0] == "-"} <= options[verb], ours
            elif ours.startswith("--"):
                assert ours.split()[0] in every_option, ours
            else:
                assert ours in known or ours in ("join", "KEY=VALUE"), f"{row}: {ours} is no key"


@pytest.mark.parametrize("row", [r for r in ALL if r.marked and not r.page.endswith(".zh.md")], ids=str)
def test_check_answers_each_marked_word(row: Row) -> None:
    for word in row.theirs:
        said = hint(word)
        if row.ours:
            named = [ours.split()[0] for ours in row.ours]
            assert any(f"that is {name}" in said or name in said.split("takes ")[0] for name in named), (
                f"{word}: {said}"
            )
        else:
            assert f"'{key_of(word)}' is of" in said, f"{word}: {said}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_recipe_of_ours_is_one(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(# \w+\.yaml\n.*?)^```", page.read_text("utf-8"), re.S | re.M)
    for text in blocks:
        (tmp_path / "shown.yaml").write_text(text)
        read_recipe(tmp_path / "shown.yaml")
    assert blocks or page.stem.partition(".")[0] in ("fleet", "lightning")
