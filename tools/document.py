"""Generates the lower part of docs/recipes.md from the code: every recipe key, and every setting of every part.

python tools/document.py            writes it
python tools/document.py --check    exits 1 if the page is not up to date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.part import SHELVES, Annotation, ParameterGroup, Reading, find, names, settings_of, summary
from paddle_dp.recipe import Precision, Recipe, schema
from paddle_dp.recipe.train_schema import Train

# Keys of a recipe whose meaning tells their default, or whose defaults have a table of their own.
IN_WORDS = ("schedule", "strategy", "callbacks", "name", "output_dir", "loader", "watch", "guard")
PAGE = Path(__file__).resolve().parent.parent / "docs/recipes.md"
MARK = "<!-- Below this line everything is written by `make docs`. -->\n"


def recipe_keys() -> Iterator[str]:
    """Every key of a recipe, and every setting of every part."""
    yield from ("## The recipe\n", *table(Recipe), "\n## train\n", *table(Train))
    yield from ("\nAs a mapping, `precision` takes:\n", *table(Precision))
    for kind in (schema.LoaderSettings, schema.WatchSettings, schema.Guard, schema.Ema, schema.Mix):
        yield from (f"\n## {kind.__name__.removesuffix('Settings').lower()}\n", *table(kind))
    yield from ("\n## turns\n", "Each entry of `turns`, by a name of yours:\n", *table(schema.TurnSettings))
    yield from ("\n## evaluation\n", *table(schema.EvaluationSettings))
    for shelf, noun in SHELVES.items():
        yield f"\n## {shelf.capitalize()}\n"
        listed = shelf in ("metrics", "callbacks")
        yield f"`{shelf}: [{{use: …}}, …]`" if listed else f"`{noun}: {{use: …}}`"
        yield from of_any(shelf)
        for name in names(shelf):
            yield from part(shelf, name)


def of_any(shelf: str) -> Iterator[str]:
    """The keys that a recipe may give for any part of the shelf, in addition to its settings."""
    if shelf == "models":
        yield "\nIn addition to its settings, any model takes tables that split its layers"
        yield "([add-a-part.md](add-a-part.md#a-model-that-nobody-prepared)):\n"
        yield from ("| key | type | meaning |", "|---|---|---|")
        for setting in settings_of(Annotation):
            yield f"| `{setting.name}` | `{setting.type}` | {setting.meaning} |"
    if shelf == "datasets":
        yield from ("\nIn addition to its settings, any data set takes:\n", *table(Reading))
    if shelf == "optimizers":
        yield ""
        yield "In addition to its settings, any optimizer takes `groups`, a list of groups of parameters by patterns of"
        yield from ("their names ([fine-tuning.md](fine-tuning.md)):\n", *table(ParameterGroup))


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


def main(words: list[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(MARK)[0] + MARK + "\n" + "\n".join(recipe_keys()) + "\n"
    if "--check" not in words:
        PAGE.write_text(written, encoding="utf-8")
    elif text != written:
        print("docs/recipes.md is not what the code says: run `make docs`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
