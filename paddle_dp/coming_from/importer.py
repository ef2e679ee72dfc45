"""Writes the recipe of another tool's configuration, and says what became of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.coming_from import paddleclas
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.recipe_text import recipe_text, summary
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.recipe import read_recipe


@dataclass(frozen=True)
class Import:
    """A written recipe. `obstacle`: why it cannot be read yet, such as a missing package of the model, or ""."""

    recipe: Path
    configuration: Configuration
    obstacle: str

    def lines(self) -> list[str]:
        """What became of the keys, for the screen."""
        c = self.configuration
        remarks = {
            "not honoured:": [f"{', '.join(each.keys)}: {each.reason}" for each in c.lost],
            "different by design:": c.differences,
            "not ready yet:": [self.obstacle] if self.obstacle else [],
        }
        lines = [f"{self.recipe}: {summary(c)}"]
        for title, sentences in remarks.items():
            lines += [title, *(f"  {sentence}" for sentence in sentences)] if sentences else []
        return [*lines, f"next: paddle-dp check {self.recipe}"]


def import_recipe(file: Path, ranks: int, out: Path | None = None, strict: bool = False) -> Import:
    """Writes the recipe of a configuration for `ranks` cards to `out`, or to NAME.yaml in the current folder.

    Raises UsageError for a configuration of an unknown tool or one that no recipe expresses, for a file that is there
    already, and with `strict` for a key that is not honoured; then nothing is written.
    """
    configuration = Configuration.read(file)
    if not configuration.has("Arch"):
        raise UsageError(
            f"{file} has no Arch, so it is no training configuration of PaddleClas, and others are not read: "
            "docs/coming-from has tables of the keys of PaddleNLP, Hugging Face, Lightning and Megatron."
        )
    try:
        sections = paddleclas.recipe(configuration, ranks)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{file}: a value is not of the kind that PaddleClas takes there: {error}"
        ) from error
    out = out if out is not None else Path(re.sub(r"[^\w.-]", "_", f"{file.stem.lower()}.yaml"))
    if strict and configuration.lost:
        keys = "\n".join(f"  {', '.join(each.keys)}: {each.reason}" for each in configuration.lost)
        raise UsageError(f"{file} is not honoured whole, and --strict is given:\n{keys}")
    if out.exists():
        raise UsageError(f"{out} exists already: name another file with --out.")
    commands = [f"paddle-dp train {out.name} --ranks {ranks}", f"paddle-dp verify {out.name} --ranks 2"]

    def write() -> None:
        out.write_text(recipe_text(sections, configuration, "PaddleClas", commands), "utf-8")

    write()
    return Import(out, configuration, _obstacle(out, sections, configuration, write))


def _obstacle(
    out: Path, sections: dict[str, Any], configuration: Configuration, write: Callable[[], None]
) -> str:
    """Why the recipe cannot be read, or "". Groups that match none of the model's parameters, or set nothing that
    earlier groups do not, are left out first: PaddleClas passes over such names."""
    while True:
        try:
            read_recipe(out)
        except RecipeError as error:
            groups = sections["optimizer"].get("groups", [])
            path = next((m.path for m in error.mistakes if m.path[:2] == ("optimizer", "groups")), ())
            if not (groups and path):
                return str(error)
            left_out = groups.pop(int(path[2]))
            configuration.differences.append(
                f"No parameter of the model needs the group {left_out['match']}."
            )
            if not groups:
                del sections["optimizer"]["groups"]
            write()
        except UsageError as error:
            return str(error)
        else:
            return ""
