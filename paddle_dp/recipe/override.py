"""Applies overrides of the command line, `a.b=c`, to a page; the value is YAML, and is checked like the file's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import Mistake, near
from paddle_dp.part.words import Keys, show
from paddle_dp.recipe.page import Page, parse


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
