"""Generates the lower part of docs/recipes.md from the code: every recipe key, and every setting of every part.

python tools/document.py            writes it
python tools/document.py --check    exits 1 if the page is not up to date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from paddle_dp.part import SHELVES, Annotation, ParameterGroup, Reading, find, names, settings_of, summary
from paddle_dp.recipe import Precision, Recipe
from paddle_dp.recipe.schema import (
    Ema,
    EvaluationSettings,
    Guard,
    LoaderSettings,
    Mix,
    TurnSettings,
    WatchSettings,
)
from paddle_dp.recipe.train_schema import Train

# Keys of a recipe whose meaning tells their default, or whose defaults have a table of their own.
IN_WORDS = ("schedule", "strategy", "callbacks", "name", "output_dir", "loader", "watch", "guard")
ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Below this line everything is written by `make docs`. -->\n"


def recipe_keys() -> Iterator[str]:
    """Every key of a recipe, and every setting of every part."""
    yield from ("## The recipe\n", *table(Recipe), "\n## train\n", *table(Train))
    yield from ("\nAs a mapping, `precision` takes:\n", *table(Precision))
    yield from ("\n## loader\n", *table(LoaderSettings))
    yield from ("\n## watch\n", *table(WatchSettings))
    yield from ("\n## guard\n", *table(Guard))
    yield from ("\n## ema\n", *table(Ema))
    yield from ("\n## mix\n", *table(Mix))
    yield from ("\n## turns\n", "Each entry of `turns`, by a name of yours:\n", *table(TurnSettings))
    yield from ("\n## evaluation\n", *table(EvaluationSettings))
    for shelf, noun in SHELVES.items():
        yield f"\n## {shelf.capitalize()}\n"
        listed = shelf in ("metrics", "callbacks")
        yield f"`{shelf}: [{{use: …}}, …]`" if listed else f"`{noun}: {{use: …}}`"
        if shelf == "models":
            yield from ("", *of_any_model())
        if shelf == "optimizers":
            yield from ("", *of_any_optimizer())
        if shelf == "datasets":
            yield from ("", *of_any_dataset())
        for name in names(shelf):
            yield from part(shelf, name)


def of_any_model() -> Iterator[str]:
    """The keys that a recipe may give for any model."""
    yield "In addition to its settings, any model takes tables that split its layers"
    yield "([add-a-part.md](add-a-part.md#a-model-that-nobody-prepared)):"
    yield from ("", "| key | type | meaning |", "|---|---|---|")
    for setting in settings_of(Annotation):
        yield f"| `{setting.name}` | `{setting.type}` | {setting.meaning} |"


def of_any_dataset() -> Iterator[str]:
    """The keys that a recipe may give for any data set."""
    yield "In addition to its settings, any data set takes:"
    yield from ("", *table(Reading))


def of_any_optimizer() -> Iterator[str]:
    """The keys that a recipe may give for any optimizer."""
    yield "In addition to its settings, any optimizer takes `groups`, a list of groups of parameters by patterns of"
    yield "their names ([fine-tuning.md](fine-tuning.md)):"
    yield from ("", *table(ParameterGroup))


def prose(text: str) -> str:
    """A docstring as Markdown, with < escaped outside `code`."""
    spans = text.split("`")
    return "`".join(span if number % 2 else span.replace("<", "\\<") for number, span in enumerate(spans))


def table(kind: type) -> Iterator[str]:
    yield from ("| key | default | meaning |", "|---|---|---|")
    for setting in settings_of(kind):
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        if setting.name == "precision" or (kind is Recipe and setting.name in IN_WORDS):
            default = ""
        yield f"| `{setting.name}` | {default} | {setting.meaning} |"


def part(shelf: str, name: str) -> Iterator[str]:
    config = find(shelf, name)
    yield f"\n### {name}\n\n{prose(summary(shelf, name))}"
    for kind in config.__mro__:  # with the notes of shared base Configs
        notes = inspect.cleandoc(vars(kind).get("__doc__") or "")
        if kind is not object and notes and not notes.startswith(f"{kind.__name__}("):
            yield "\n" + prose(notes).replace("\n`", "\n\n`")
    settings = settings_of(config)
    if settings:
        yield from ("", "| setting | default | meaning | type |", "|---|---|---|---|")
    for setting in settings:
        words = setting.type.replace("|", "\\|")
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        yield f"| `{setting.name}` | {default} | {prose(setting.meaning)} | `{words}` |"


PAGES: dict[str, Callable[[], Iterator[str]]] = {"recipes.md": recipe_keys}


def main(words: list[str]) -> int:
    status = 0
    for name, written in PAGES.items():
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8")
        wanted = text.partition(MARK)[0] + MARK + "\n" + "\n".join(written()) + "\n"
        if "--check" not in words:
            page.write_text(wanted, encoding="utf-8")
        elif text != wanted:
            print(f"docs/{name} is not what the code says: run `make docs`.")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
