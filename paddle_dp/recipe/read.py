"""Reads a recipe from a file and overrides, or raises every mistake in them.

An override, `a.b=c` on the command line, changes the page that was read; its value is YAML, checked like the file's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

from paddle_dp.errors import Mistake, RecipeError, near
from paddle_dp.part import ErrorContext, names, read_settings
from paddle_dp.part.config import Keys, show
from paddle_dp.recipe import code, full_width, hf_config
from paddle_dp.recipe.recipe import Recipe
from paddle_dp.recipe.schema import DEFAULTS
from paddle_dp.recipe.yaml_document import YamlDocument, parse, read_page


class _UnknownKeyError(Exception):
    """An override's key does not exist; the message lists the existing ones."""


@dataclass(frozen=True)
class _Override:
    location: str
    keys: tuple[str, ...]
    value: Any

    @property
    def order(self) -> tuple[int, bool]:
        """The sort key: whole groups before their settings, and `use`, which empties a part, before its settings."""
        return len(self.keys), self.keys[-1] != "use"


def override_location(text: str) -> str:
    """The location that a mistake in this override names."""
    return f"override '{text}'"


def apply_overrides(page: YamlDocument, texts: Sequence[str]) -> None:
    """Applies the overrides to the page and adds their mistakes to the page's."""
    for override in sorted(filter(None, [_read(text, page) for text in texts]), key=lambda o: o.order):
        try:
            _put(page, override)
        except _UnknownKeyError as error:
            page.mistakes.append(_explained(Mistake(where=override.location, message=str(error)), page.text))


def _read(text: str, page: YamlDocument) -> _Override | None:
    name, equals, value = text.partition("=")
    keys = tuple(name.strip().split("."))
    location = override_location(text)
    if not equals or not all(keys):
        message = "is not of the form KEY=VALUE, such as train.batch=64"
        message += "; several numbers of one option are one word: 8,16" if text.isdecimal() else ""
        hints = full_width.yaml_hints(text, numbered=False)
        page.mistakes.append(Mistake(where=location, message=f"{message}.{hints}" if hints else message))
        return None
    parsed = parse(value, location, numbered=False)
    page.mistakes += parsed.mistakes
    return None if parsed.mistakes else _Override(location, keys, parsed.values)


def _put(page: YamlDocument, override: _Override) -> None:
    """Finds the group of the last key, creating missing groups, and sets the key."""
    *way, last = override.keys
    path: Keys = ()
    group: Any = page.values
    for segment in way:
        key = _key(group, segment, path)
        path = (*path, key)
        if isinstance(group, list) and key == len(group):
            group.append({})
        elif isinstance(group, dict) and group.get(segment) is None:
            group[segment] = [] if path in _LISTS else {}
        if not group[key]:  # new or empty, so the file has no line for it
            page.source_lines.setdefault(path, override.location)
        group = group[key]
    key = _key(group, last, path)
    if key == "use":  # another part: the previous settings go
        group.clear()
        _locate(page, path, override.location)
    if isinstance(group, list) and key == len(group):
        group.append(None)
    group[key] = override.value
    _locate(page, (*path, key), override.location)


def _key(group: Any, segment: str, path: Keys) -> str | int:
    """The key of a word in this group: the word itself; in a list, its number, or the index of the item with this
    `use`."""
    here = ".".join(map(str, path))
    if isinstance(group, dict):
        return segment
    if not isinstance(group, list):
        raise _UnknownKeyError(f"{here} is {show(group)}, which has no settings")
    if segment.isdecimal() and int(segment) <= len(group):
        return int(segment)
    uses = [item.get("use") if isinstance(item, dict) else None for item in group]
    if segment not in uses:
        present = ", ".join(str(use) for use in uses if use) or f"{len(group)} of them"
        meant = near(segment, [str(use) for use in uses if use])
        added = "NAME" if segment.isdecimal() or segment == "use" else segment
        how = f"Did you mean '{meant}'?" if meant else f"To add one: {here}.{len(group)}.use={added}"
        raise _UnknownKeyError(f"{here} has no '{segment}' (it has {present}). {how}")
    return uses.index(segment)


def _locate(page: YamlDocument, path: Keys, location: str) -> None:
    """Sets the location of a key, and deletes the locations of the keys below, which an override removed."""
    for known in [k for k in page.source_lines if k[: len(path)] == path]:
        del page.source_lines[known]
    page.source_lines[path] = location


def _in_callbacks(name: str) -> str:
    """The hint for a callback's name, which states where its settings belong; else ""."""
    return f" {name} is a callback: callbacks.{name}." if name in names("callbacks") else ""


_LISTS = [(key,) for key, field in Recipe.model_fields.items() if get_origin(field.annotation) is tuple]
_RECIPE = ErrorContext(subject="a recipe", hint=_in_callbacks)


def read_recipe(path: str | Path, overrides: Sequence[str] = (), *, tries: bool = True) -> Recipe:
    """Reads the recipe in this file, with `overrides` ("train.batch=64") applied.

    Imports its parts' modules (`foreign_code` lists foreign ones). `tries`: builds an annotated model, without memory,
    to check the annotation.

    Raises RecipeError with every mistake, each with its `file:line` or its override; InstallError if a part needs
    Paddle and it is not installed.
    """
    path = Path(path)
    page = _read_values(path, overrides)
    hf_config.expand(page, path)
    page.values.setdefault("name", path.stem)
    try:
        recipe = read_settings(Recipe, page.values, _RECIPE, home=path, tries=tries)
    except RecipeError as error:
        located = [replace(m, where=page.source_line(m.path)) for m in error.mistakes]
        page.mistakes += [_explained(mistake, page.text) for mistake in located]
    if page.mistakes:
        order = [override_location(text) for text in overrides]
        raise RecipeError(sorted(page.mistakes, key=lambda mistake: _order(mistake, order)))
    return recipe


def foreign_code(path: str | Path, overrides: Sequence[str] = ()) -> list[str]:
    """The modules outside this package and Paddle that reading this recipe would import: the file of each, or its name
    without one. Imports nothing. Raises RecipeError if the file is not YAML."""
    path = Path(path)
    return code.modules(_read_values(path, overrides).values, path)


def train_settings(path: str | Path, overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """The recipe's group `train` as it is written, unchecked, with `overrides` applied; empty if it is no group. Raises
    RecipeError if the file is not YAML."""
    train = _read_values(Path(path), overrides).values.get("train")
    return train if isinstance(train, Mapping) else {}


def _read_values(path: Path, overrides: Sequence[str]) -> YamlDocument:
    page = read_page(path)
    for key, default in DEFAULTS.items():
        page.values.setdefault(key, copy.deepcopy(default))
    apply_overrides(page, overrides)
    return page


def _explained(mistake: Mistake, text: str) -> Mistake:
    hint = full_width.value_hint(mistake.message, mistake.where, text)
    return replace(mistake, message=f"{mistake.message.removesuffix('.')}.{hint}") if hint else mistake


def _order(mistake: Mistake, overrides: Sequence[str]) -> tuple[bool, int]:
    """The sort key: the file's mistakes from top to bottom, then the overrides' in their order."""
    if mistake.where in overrides:
        return True, overrides.index(mistake.where)
    number = re.search(r":(\d+)$", mistake.where)
    return False, int(number[1]) if number else 0
