"""Reads a recipe from a file and overrides, or raises every mistake in them."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paddle_dp.errors import Mistake, RecipeError
from paddle_dp.part import Owner, names, read_settings
from paddle_dp.recipe import foreign, published
from paddle_dp.recipe.override import lay_over, override_place
from paddle_dp.recipe.page import Page, read_page
from paddle_dp.recipe.schema import DEFAULTS, Recipe


def _in_callbacks(name: str) -> str:
    """A sentence on where the settings of a callback are, for the name of one."""
    return f" {name} is a callback: callbacks.{name}." if name in names("callbacks") else ""


_RECIPE = Owner(subject="a recipe", hint=_in_callbacks)


def read_recipe(path: str | Path, overrides: Sequence[str] = (), *, tries: bool = True) -> Recipe:
    """The recipe in this file, with `overrides` ("train.batch=64") applied.

    Imports the modules that its parts are in (`foreign_code` names those outside the package). `tries`: builds a model
    that the recipe annotates, without memory, to compare the two; without it, nothing is built.

    Raises RecipeError with every mistake, each with its `file:line` or its override; InstallError if a part needs
    Paddle and it is not installed.
    """
    path = Path(path)
    page = _read_values(path, overrides)
    published.expand(page, path)
    page.values.setdefault("name", path.stem)
    try:
        recipe = read_settings(Recipe, page.values, _RECIPE, home=path, tries=tries)
    except RecipeError as error:
        page.mistakes += [replace(m, where=page.place(m.path)) for m in error.mistakes]
    if page.mistakes:
        order = [override_place(text) for text in overrides]
        raise RecipeError(sorted(page.mistakes, key=lambda mistake: _order(mistake, order)))
    return recipe


def foreign_code(path: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """The modules outside this package and Paddle that reading this recipe would import, without importing them: the
    file of each, or its name where there is none. Raises RecipeError where the file is not YAML."""
    path = Path(path)
    return foreign.modules(_read_values(path, overrides).values, path)


def _read_values(path: Path, overrides: Sequence[str]) -> Page:
    page = read_page(path)
    for key, default in DEFAULTS.items():
        page.values.setdefault(key, copy.deepcopy(default))
    lay_over(page, overrides)
    return page


def _order(mistake: Mistake, overrides: Sequence[str]) -> tuple[bool, int]:
    """The sort key: the file's mistakes from top to bottom, then those of the overrides in their order."""
    if mistake.where in overrides:
        return True, overrides.index(mistake.where)
    number = re.search(r":(\d+)$", mistake.where)
    return False, int(number[1]) if number else 0
