"""Reads a recipe from a file and overrides, or raises every mistake in them.

An override, `a.b=c` on the command line, is applied to the page of the file; its value is YAML, and is checked like the
file's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddle_dp.errors import Mistake, RecipeError, near
from paddle_dp.part import Owner, names, read_settings
from paddle_dp.part.words import Keys, show
from paddle_dp.recipe import foreign, published
from paddle_dp.recipe.page import Page, parse, read_page
from paddle_dp.recipe.schema import DEFAULTS, Recipe


class _NoSuchPlaceError(Exception):
    """An override whose key does not exist; the message says what does."""


@dataclass(frozen=True)
class _Override:
    text: str
    keys: tuple[str, ...]
    value: Any

    @property
    def where(self) -> str:
        return override_place(self.text)

    @property
    def order(self) -> tuple[int, bool]:
        """Whole groups before their settings, and `use`, which empties a part, before the part's others."""
        return len(self.keys), self.keys[-1] != "use"


def override_place(text: str) -> str:
    """The place that a mistake in this override names."""
    return f"override '{text}'"


def lay_over(page: Page, texts: Sequence[str]) -> None:
    """Applies the overrides to the page, and adds their mistakes to the page's."""
    read = [_read(text, page) for text in texts]
    for override in sorted((o for o in read if o), key=lambda o: o.order):
        try:
            _put(page, override)
        except _NoSuchPlaceError as error:
            page.mistakes.append(Mistake(where=override.where, what=str(error)))


def _read(text: str, page: Page) -> _Override | None:
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    where = override_place(text)
    if not equals or not all(keys):
        what = "is not of the form KEY=VALUE, such as train.batch=64"
        page.mistakes.append(Mistake(where=where, what=what))
        return None
    parsed = parse(value, where, numbered=False)
    page.mistakes += parsed.mistakes
    return None if parsed.mistakes else _Override(text, keys, parsed.values)


def _put(page: Page, override: _Override) -> None:
    """Finds the group of the last key, making groups on the way, and sets the key."""
    *way, last = override.keys
    path: Keys = ()
    group: Any = page.values
    for word in way:
        key = _key(group, word, path)
        path = (*path, key)
        if isinstance(group, list) and key == len(group):
            group.append({})
        elif isinstance(group, dict) and group.get(word) is None:
            group[word] = {}
        if not group[key]:  # made just now, or empty: the file does not say where
            page.places.setdefault(path, override.where)
        group = group[key]
    key = _key(group, last, path)
    if key == "use":  # another part: nothing of the one before it stays
        group.clear()
        _forget(page, path)
        page.places[path] = override.where
    if isinstance(group, list) and key == len(group):
        group.append(None)
    group[key] = override.value
    whole = (*path, key)
    _forget(page, whole)
    page.places[whole] = override.where


def _key(group: Any, word: str, path: Keys) -> str | int:
    """The key of a word in this group: the word; in a list, the number that it is, or of the item with this `use`."""
    here = ".".join(map(str, path))
    if isinstance(group, dict):
        return word
    if not isinstance(group, list):
        raise _NoSuchPlaceError(f"{here} is {show(group)}, which has no settings of its own")
    if word.isdecimal() and int(word) <= len(group):
        return int(word)
    uses = [item.get("use") if isinstance(item, dict) else None for item in group]
    if word not in uses:
        held = ", ".join(str(use) for use in uses if use) or f"{len(group)} of them"
        meant = near(word, [str(use) for use in uses if use])
        how = f"Did you mean '{meant}'?" if meant else f"To add one: {here}.{len(group)}.use={word}"
        raise _NoSuchPlaceError(f"{here} has no '{word}' (it has {held}). {how}")
    return uses.index(word)


def _forget(page: Page, path: Keys) -> None:
    """Deletes the places of keys that an override removed."""
    for known in [k for k in page.places if k[: len(path)] == path]:
        del page.places[known]


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
