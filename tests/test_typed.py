"""Every command of every page can be typed: its verb and options exist, and its recipe takes its settings.

The pages of docs/start, docs/how-to, docs/learn and examples/ mark the commands that other tests run. The reference
pages also show commands for machines and data that no test has.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddle_dp.cli.app import command, with_resume_value
from paddle_dp.part.shelf import shipped
from paddle_dp.recipe import read_recipe

ROOT = Path(__file__).resolve().parent.parent
CHINESE = (".zh.md", "_zh.md")  # tests/test_docs.py compares their blocks with the English ones
PAGES = [
    page
    for page in (
        ROOT / "README.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("examples/**/*.md")),
    )
    if not page.name.endswith(CHINESE) and "decisions" not in page.parts
]
# Commands that a page shows for their error, by their beginning.
MISTAKES = (
    "check bad.yaml",
    "check configs/gpt_6_7b.yaml --no-run --ranks 8 strategy={use: hybrid, tensor: 3}",
    "train configs/digits_mlp.yaml --ranks 2 train.epochs=3",
    "train configs/gpt_tiny.yaml --ranks 3 strategy.tensor=3",
)
WORDS = re.compile(r"[|&;>]+$|\d?>.*|<<.*")  # where a command ends on its line


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of `paddle-dp` in a page's blocks, after `paddle-dp` itself."""
    for lang, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M):
        if lang not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:\w+=\S+ )*paddle-dp +(.*)", line):
                try:
                    words = shlex.split(match[1], comments=True)
                except ValueError:  # a quotation that goes on below
                    continue
                end = next((n for n, word in enumerate(words) if WORDS.match(word)), len(words))
                yield words[:end]


GROUP = command()
COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.stem}-{' '.join(words)[:60]}" for page, words in COMMANDS]
)
def test_a_command_of_a_page_can_be_typed(page: Path, words: list[str]) -> None:
    if any(word.startswith("[--") or word in ("R", "HOST:PORT") for word in words):
        return  # a synopsis
    with GROUP.make_context("paddle-dp", with_resume_value(words)) as context:
        name, verb, rest = GROUP.resolve_command(context, with_resume_value(words))
        typed = verb.make_context(name, rest, parent=context).params
    recipe, text = typed.get("recipe"), " ".join(words)
    if recipe is None or text.startswith(MISTAKES) or "$" in text:
        return
    path = ROOT / str(recipe) if (ROOT / str(recipe)).is_file() else shipped(str(recipe))
    if path is not None:  # else it is a file of the page
        settings = [
            word
            for word in typed.get("overrides") or ()
            if not re.search(r"mine\.|wire\.|/|from:|^load\.", word)
        ]
        read_recipe(path, settings, tries=False)


def test_there_are_many_of_them() -> None:
    read = sum(any(word.startswith("configs/") for word in words) for _, words in COMMANDS)
    print(f"{len(COMMANDS)} commands on {len(PAGES)} pages, {read} of them on a shipped recipe")
    assert len(COMMANDS) > 150 and read >= 80


def test_every_python_block_is_python() -> None:
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
            if page.name != "api.md":  # signatures
                ast.parse(code)
