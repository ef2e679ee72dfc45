"""Finds the recipes that come with the package by name, from any folder, and copies them as a starting point."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.part.shelf import shipped
from paddle_dp.recipe.read import read_recipe


def at_hand(file: Path) -> Path:
    """`file` if it exists; else the shipped recipe of this name, for "digits_mlp" and "configs/digits_mlp.yaml"; else
    `file`. Prints a line to stderr for a shipped recipe."""
    shipped_recipe = _recipe(file.stem) if file.parent in (Path(), Path("configs")) else None
    if shipped_recipe is None or file.suffix not in ("", ".yaml") or file.is_file():
        return file
    print(f"{file} is not in this folder: the shipped recipe of that name is read", file=sys.stderr)
    return shipped_recipe


def comes_with_package(file: Path) -> bool:
    """Whether `file` is a shipped recipe, where the package has it."""
    recipe = _recipe(file.stem)
    return recipe is not None and file.is_file() and recipe.samefile(file)


def copy(name: str, into: Path) -> list[Path]:
    """Copies a shipped recipe to `into`/configs, and its model, if shipped, to `into`/models. Returns the new files.
    Raises UsageError, before anything is written, for an unknown recipe or a file that exists."""
    recipe = _recipe(name)
    if recipe is None:
        names = sorted(file.stem for file in (shipped("configs") or Path()).glob("*.yaml"))
        raise UsageError(f"There is no shipped recipe '{name}'.{did_you_mean(name, names, 'There are')}")
    copies = {into / "configs" / recipe.name: recipe}
    model = read_recipe(recipe).model.name
    copies |= {into / file.relative_to(recipe.parents[1]): file for file in _model(model)}
    there = [str(file) for file in copies if file.exists()]
    if there:
        raise UsageError(
            f"{', '.join(there)} would be overwritten. Choose another folder, or move the existing files."
        )
    for target, source in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    return list(copies)


def command(recipe: Path) -> str:
    """The first training command in a shipped recipe's header, which has as many ranks as the layout needs."""
    match = re.search(rf"paddle-dp train configs/{re.escape(recipe.name)}[^#;\n]*", recipe.read_text("utf-8"))
    return match[0].strip() if match else f"paddle-dp train configs/{recipe.name}"


def _recipe(name: str) -> Path | None:
    folder = shipped("configs")
    file = folder / f"{name}.yaml" if folder else None
    return file if file is not None and file.is_file() else None


def _model(name: str) -> Iterator[Path]:
    """Yields the files of a shipped model: its file or folder, and the files of models/ that it imports."""
    folder, names = shipped("models") or Path(), [name]
    for each in names:  # grows
        for file in (folder / f"{each}.py", *sorted((folder / each).rglob("*.py"))):
            if file.is_file():
                yield file
                names += [other for other in _imported(file) if other not in names]


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "models":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("models."):
            yield str(node.module).split(".")[1]
