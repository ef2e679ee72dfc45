"""Writes the resolved recipe as YAML with every default, so that it can be run again."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.files import replacing
from paddle_dp.recipe.recipe import Recipe

RESOLVED = "recipe.yaml"  # its name in a run's folder


def recipe_text(recipe: Recipe) -> str:
    """The recipe as YAML; read_recipe reads exactly this recipe from it."""
    return yaml_text(recipe.model_dump(mode="json"))


def yaml_text(content: Mapping[str, Any]) -> str:
    """YAML of a resolved recipe's content, as a checkpoint keeps it."""
    writer = YAML(typ="safe", pure=True)
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.default_flow_style = None
    writer.width = 10_000  # no wrapped lines
    text = io.StringIO()
    writer.dump(dict(content), text)
    return text.getvalue()


def resolved(folder: str | Path) -> Path:
    """The path of a run's recipe. Raises UsageError if `folder` is not a run's."""
    file = Path(folder) / RESOLVED
    if not file.is_file() and (Path(folder) / "checkpoints").is_dir():
        raise UsageError(
            f"{folder} is a script's run (Trainer.of), without a recipe to make its model and data from. Write one to "
            f"{file}, with the same model, dataset and loss, such as model: {{use: mypackage.make_model}}. "
            f"`paddle-dp merge {folder} -o FILE` needs none, and writes the weights."
        )
    if not file.is_file():
        wrong = f"holds no {RESOLVED}" if Path(folder).is_dir() else "is no folder"
        runs = [path.parent.name for path in Path(folder).parent.glob(f"*/{RESOLVED}")]
        hint = did_you_mean(Path(folder).name, runs, "Runs next to it:") if runs else ""
        raise UsageError(f"{folder} {wrong}: name the folder of a run, such as runs/NAME.{hint}")
    return file


def write_recipe(recipe: Recipe, path: str | Path, header: str = "") -> None:
    """Writes the resolved recipe to `path`, whole or not at all. `header`: its first lines, comments. Raises
    OSError."""
    path = Path(path)
    header = header or f"# Resolved: every default is written out. Again:  paddle-dp train {path}\n"
    with replacing(path) as partial:
        partial.write_text(header + recipe_text(recipe), "utf-8")
