"""Writes the lower part of docs/recipes.md from the schema and the shelves: every key, its default, what it means.

python tools/document_recipes.py            writes the page
python tools/document_recipes.py --check    says whether the page is the one that would be written, and exits 1 if not
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.part import SHELVES, find, names, settings_of, summary
from paddle_dp.recipe import Precision, Recipe
from paddle_dp.recipe.schema import CALLBACKS, LoaderSettings, Train

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"

MARK = "<!-- Below this line everything is written by `make docs`, from the schema and the shelves. -->\n"

MEANINGS = {
    "name": "The run's name. By default the file's, without `.yaml`.",
    "model": "What learns: a part of `models/`.",
    "dataset": "What it learns from: a part.",
    "loss": "What should fall: a part. Without one, the model's own method `loss(outputs, targets)`.",
    "optimizer": "How an update is made of gradients: a part.",
    "schedule": "The learning rate over the steps: a part. By default `{use: constant, peak: 0.001}`.",
    "strategy": "How the model lies on the ranks: a part. By default `{use: data_parallel}`.",
    "train": "How long, with which batch: see below.",
    "loader": "How samples are read: see below.",
    "callbacks": f"A list of parts that watch. By default {', '.join(CALLBACKS)}.",
    "out": "The run's folder. By default `runs/<name>`.",
    "train.length": "How far to train, from the very beginning: also a resumed run ends there.",
    "train.batch": "Samples per update, over **all** ranks: the optimizer sees the same batch on any number of ranks.",
    "train.micros": "In how many parts each batch is computed, to need less memory; the update stays the same.",
    "train.precision": "`float32`, `bfloat16` or `float16`, or a mapping: see below.",
    "train.seed": "Where all randomness begins: weights, order of samples, augmentation, dropout.",
    "train.last": "The last batch of an epoch, when it is short: `keep` or `drop` it.",
    "train.device": "`auto` takes a GPU for each rank when Paddle sees any.",
    "loader.workers": "Processes that read ahead, for each rank; 0 reads in the rank itself.",
    "loader.prefetch": "How many batches they may be ahead.",
    "loader.timeout": "How long one sample may take before its worker counts as hung.",
    "train.precision.dtype": "The number format of products and convolutions.",
    "train.precision.level": "`O1` computes in it where that is safe; `O2` keeps weights in it too, with float32 copies.",
    "train.precision.scale": "The loss scale to begin with, for float16 only; it then adapts.",
}


def page() -> str:
    """The whole page: what was written by hand down to the mark, and the keys."""
    parts = ["## The recipe\n", *table(Recipe), "\n## train\n", *table(Train, "train.")]
    parts += ["\nAs a mapping, `precision` takes:\n", *table(Precision, "train.precision.")]
    parts += ["\n## loader\n", *table(LoaderSettings, "loader.")]
    for shelf, noun in SHELVES.items():
        parts += [
            f"\n## {shelf.capitalize()}\n",
            f"`{noun}: {{use: …}}`" if noun != "callback" else "`callbacks: [{use: …}, …]`",
        ]
        for name in names(shelf):
            parts += part(shelf, name)
    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return by_hand + MARK + "\n" + "\n".join(parts) + "\n"


def table(kind: type, prefix: str = "") -> Iterator[str]:
    yield from ("| key | default | meaning |", "|---|---|---|")
    for setting in settings_of(kind):
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        if setting.name in ("schedule", "strategy", "callbacks", "name", "out", "loader", "precision"):
            default = ""  # the meaning says it better
        yield f"| `{setting.name}` | {default} | {MEANINGS[prefix + setting.name]} |"


def part(shelf: str, name: str) -> Iterator[str]:
    config = find(shelf, name)
    yield f"\n### {name}\n\n{summary(shelf, name)}"
    for kind in config.__mro__:  # what neighbours share stands in a Config that they inherit
        notes = inspect.cleandoc(vars(kind).get("__doc__") or "")
        if kind is not object and notes and not notes.startswith(f"{kind.__name__}("):
            yield "\n" + notes.replace("\n`", "\n\n`")
    settings = settings_of(config)
    if settings:
        yield from ("", "| setting | type | default |", "|---|---|---|")
    for setting in settings:
        words = setting.type.replace("|", "\\|")
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        yield f"| `{setting.name}` | `{words}` | {default} |"


def main(words: list[str]) -> int:
    text = page()
    if "--check" not in words:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/recipes.md is not what the schema and the shelves say: run `make docs`.")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
