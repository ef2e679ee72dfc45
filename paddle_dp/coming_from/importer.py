"""Writes the recipe of another tool's configuration, and accounts for each of its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paddle_dp.coming_from import huggingface, paddleclas, paddlenlp
from paddle_dp.coming_from.configuration import Configuration
from paddle_dp.coming_from.recipe_text import recipe_text, summary
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.mesh.degrees import AXES
from paddle_dp.recipe import read_recipe


class Tool(Protocol):
    """Another tool: a module that recognizes its configurations, and makes a recipe's sections of one.

    `recipe` takes the number of ranks that the configuration is written for, and the folder of the model's config.json.
    """

    NAME: str

    def recognizes(self, c: Configuration, /) -> bool: ...
    def recipe(self, c: Configuration, ranks: int, folder: Path | None, /) -> dict[str, Any]: ...


TOOLS: tuple[Tool, ...] = (paddleclas, paddlenlp, huggingface)


@dataclass(frozen=True)
class Import:
    """A written recipe. `obstacle`: why it cannot be read yet, such as a missing package of the model, or ""."""

    recipe: Path
    configuration: Configuration
    tool: str
    verify: str
    obstacle: str

    def lines(self) -> list[str]:
        """The account of the keys, for the screen."""
        c = self.configuration
        remarks = {
            "not honoured:": [f"{', '.join(each.keys)}: {each.reason}" for each in c.lost],
            "to fill in:": c.to_fill,
            "different by design:": c.differences,
            "not ready yet:": [self.obstacle] if self.obstacle else [],
        }
        lines = [f"{self.recipe} of {self.tool}: {summary(c)}"]
        for title, sentences in remarks.items():
            lines += [title, *(f"  {sentence}" for sentence in sentences)] if sentences else []
        return [*lines, f"next: paddle-dp check {self.recipe}", f"then: {self.verify}"]


def import_recipe(
    file: Path, ranks: int | None, out: Path | None = None, strict: bool = False, model: Path | None = None
) -> Import:
    """Writes the recipe of a configuration for `ranks` cards to `out`, or to NAME.yaml in the current folder. `model`:
    the folder of the model's config.json, where the file does not name it.

    Raises UsageError for a configuration of an unknown tool or one that no recipe expresses, without `ranks`, for a
    file that is there already, and with `strict` for a key that is not honoured; then nothing is written.
    """
    configuration = Configuration.read(file)
    tool = next((tool for tool in TOOLS if tool.recognizes(configuration)), None)
    if tool is None and configuration.has("log_history"):
        raise UsageError(
            f"{file} is a trainer's progress, without its arguments. training_args.bin next to it has them: import "
            "that file, and the message says how to write it as JSON."
        )
    if tool is None:
        raise UsageError(
            f"{file} has neither Arch, so it is no training configuration of PaddleClas, nor arguments of PaddleNLP, "
            "PaddleFormers or Hugging Face's Trainer, such as per_device_train_batch_size. docs/coming-from has tables "
            "of the keys of these, and of Lightning and Megatron."
        )
    if ranks is None or ranks < 1:
        launched = configuration.launched
        hint = f"its launcher starts {launched} on a machine: --ranks {launched}" if launched else "--ranks 4"
        raise UsageError(
            f"{file}: its batch size is for one card. Say for how many it is written, on all machines: {hint}."
        )
    try:
        sections = tool.recipe(configuration, ranks, model)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{file}: a value is not of the kind that {tool.NAME} takes there: {error}"
        ) from error
    out = out if out is not None else Path(re.sub(r"[^\w.-]", "_", f"{file.stem.lower()}.yaml"))
    if strict and configuration.lost:
        keys = "\n".join(f"  {', '.join(each.keys)}: {each.reason}" for each in configuration.lost)
        raise UsageError(f"{file} is not honoured whole, and --strict is given:\n{keys}")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.parent}: make it first.")
    if out.exists():
        raise UsageError(f"{out} exists already: name another file with --out.")
    # The recipe is compared with one process on two ranks, or as many as its axes need.
    least = max(2, math.prod(sections["strategy"].get(axis, 1) for axis in AXES))
    commands = [f"paddle-dp train {out.name} --ranks {ranks}", f"paddle-dp verify {out} --ranks {least}"]

    def write() -> None:
        text = recipe_text(sections, configuration, tool.NAME, commands)
        try:
            out.write_bytes(text.encode("utf-8", "replace"))  # half a letter is none
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror}") from error

    write()
    return Import(out, configuration, tool.NAME, commands[1], _obstacle(out, sections, configuration, write))


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
            configuration.differ(f"No parameter of the model needs the group {left_out['match']}.")
            if not groups:
                del sections["optimizer"]["groups"]
            write()
        except UsageError as error:
            return str(error)
        else:
            return ""
