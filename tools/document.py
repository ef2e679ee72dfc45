"""Writes what the code knows into docs/recipes.md: every recipe key, and every setting of every part.

python tools/document.py            writes the lower part of the page
python tools/document.py --check    says when the page is not what would be written, and exits 1
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from paddle_dp.part import SHELVES, Annotation, find, names, settings_of, summary
from paddle_dp.recipe import Precision, Recipe
from paddle_dp.recipe.schema import CALLBACKS, LoaderSettings, Train

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Below this line everything is written by `make docs`. -->\n"

MEANINGS = {
    "name": "The run's name. By default the file's, without `.yaml`.",
    "model": "What learns: a part of `models/`.",
    "model.cuts": "Pattern of layers, or of a number that counts what is cut (`….num_heads`), to the way to cut it.",
    "model.attends": "Pattern of layers to their method in which tokens meet.",
    "model.blocks": "The layers whose chain is the forward: patterns, functions, and lists of them that stay together.",
    "dataset": "What it learns from: a part.",
    "loss": "What should fall: a part. Without one, the model's own method `loss(outputs, targets)`.",
    "optimizer": "How an update is made of gradients: a part.",
    "schedule": "The learning rate over the steps: a part. By default `{use: constant, learning_rate: 0.001}`.",
    "strategy": "How the model lies on the ranks: a part. By default `{use: data_parallel}`.",
    "train": "How long, with which batch: see below.",
    "loader": "How samples are read: see below.",
    "callbacks": f"A list of parts that watch. By default {', '.join(CALLBACKS)}.",
    "output_dir": "The run's folder. By default `runs/<name>`.",
    "train.length": "How far to train, from the very beginning: also a resumed run ends there.",
    "train.batch": "Samples per update, over **all** ranks: the optimizer sees the same batch on any number of ranks.",
    "train.micro_batches": "In how many parts each batch is computed, to need less memory; the update stays the same.",
    "train.patience": "How long an exchange between ranks on CPUs waits for one that is late, before the job ends.",
    "train.precision": "`float32`, `bfloat16`, `float16` or `float64`, or a mapping: see below.",
    "train.seed": "Where all randomness begins: weights, order of samples, augmentation, dropout.",
    "train.drop_last": "Whether the last batch of an epoch is left out when it is short.",
    "train.dropout": "`exact`: the same masks on any number of ranks, in every layout ([dropout.md](dropout.md)). "
    "`own`: each rank draws its own, by Paddle's kernels (on a GPU the fused ones), and learns something else than one "
    "process.",
    "train.device": "`auto` takes a GPU for each rank when Paddle sees any.",
    "loader.num_workers": "Processes that read ahead, for each rank; 0 reads in the rank itself.",
    "loader.prefetch": "How many batches they may be ahead.",
    "loader.timeout": "How long one sample may take before its worker counts as hung.",
    "train.precision.dtype": "The number format of products and convolutions; of everything if `float64`.",
    "train.precision.level": "`O1` computes in it where that is safe; `O2` also keeps weights in it.",
    "train.precision.scale": "The loss scale to begin with, for float16 only; it then adapts.",
}


def recipe_keys() -> Iterator[str]:
    """Every key of a recipe, and every setting of every part."""
    yield from ("## The recipe\n", *table(Recipe), "\n## train\n", *table(Train, "train."))
    yield from ("\nAs a mapping, `precision` takes:\n", *table(Precision, "train.precision."))
    yield from ("\n## loader\n", *table(LoaderSettings, "loader."))
    for shelf, noun in SHELVES.items():
        yield f"\n## {shelf.capitalize()}\n"
        yield f"`{noun}: {{use: …}}`" if noun != "callback" else "`callbacks: [{use: …}, …]`"
        if shelf == "models":
            yield from ("", *of_any_model())
        for name in names(shelf):
            yield from part(shelf, name)


def of_any_model() -> Iterator[str]:
    """What a recipe may say about the layers of any model."""
    yield "Beside its own settings, any model takes what says how its layers can be split"
    yield "([add-a-part.md](add-a-part.md#a-model-that-nobody-prepared)):"
    yield from ("", "| key | type | meaning |", "|---|---|---|")
    for setting in settings_of(Annotation):
        yield f"| `{setting.name}` | `{setting.type}` | {MEANINGS[f'model.{setting.name}']} |"


def prose(text: str) -> str:
    """A docstring as Markdown: <run> is no HTML, unless it stands in `code`."""
    spans = text.split("`")
    return "`".join(span if number % 2 else span.replace("<", "\\<") for number, span in enumerate(spans))


def table(kind: type, prefix: str = "") -> Iterator[str]:
    yield from ("| key | default | meaning |", "|---|---|---|")
    for setting in settings_of(kind):
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        if setting.name in ("schedule", "strategy", "callbacks", "name", "output_dir", "loader", "precision"):
            default = ""  # the meaning says it better
        yield f"| `{setting.name}` | {default} | {MEANINGS[prefix + setting.name]} |"


def part(shelf: str, name: str) -> Iterator[str]:
    config = find(shelf, name)
    yield f"\n### {name}\n\n{prose(summary(shelf, name))}"
    for kind in config.__mro__:  # what neighbours share stands in a Config that they inherit
        notes = inspect.cleandoc(vars(kind).get("__doc__") or "")
        if kind is not object and notes and not notes.startswith(f"{kind.__name__}("):
            yield "\n" + prose(notes).replace("\n`", "\n\n`")
    settings = settings_of(config)
    if settings:
        yield from ("", "| setting | type | default |", "|---|---|---|")
    for setting in settings:
        words = setting.type.replace("|", "\\|")
        default = "**must be given**" if setting.default is None else f"`{setting.default}`"
        yield f"| `{setting.name}` | `{words}` | {default} |"


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
