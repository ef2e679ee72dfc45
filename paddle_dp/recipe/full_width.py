"""Finds full-width punctuation in a refused recipe: input methods for Chinese type `，：｛` where YAML has `,:{`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from paddle_dp.errors import Mistake

_IRREGULAR = {"“": '"', "”": '"', "‘": "'", "’": "'", "、": ",", "【": "[", "】": "]", "\u3000": " "}
_ASCII = {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | _IRREGULAR
_WIDE = f"[{re.escape(''.join(_ASCII))}]"
# Between two Chinese characters it is punctuation of a text.
_PUNCTUATION = re.compile(rf"(?<![^\x00-\x7f]){_WIDE}|{_WIDE}(?![^\x00-\x7f])")
_TEXT = re.compile(r""""[^"]*"|'[^']*'|(?:^|(?<=\s))#.*""")  # quoted, or a comment


def hint(line: str, subject: str) -> str:
    """Returns " `subject` has the full-width '，': write ','." for a line with such characters outside of quotes and
    comments, else ""."""
    wide = dict.fromkeys(_PUNCTUATION.findall(_TEXT.sub(" ", line)))
    characters, replacements = (", ".join(map("'{}'".format, row)) for row in (wide, map(_ASCII.get, wide)))
    return f" {subject} has the full-width {characters}: write {replacements}." if wide else ""


def line_hints(text: str, first: int, last: int) -> str:
    """Returns the hints on the lines `first` to `last`, from 0, of a recipe that YAML refuses, and on the line before
    them, where the cause may be."""
    lines = text.splitlines()
    before = [number for number in range(min(first, len(lines))) if _TEXT.sub("", lines[number]).strip()]
    numbers = [*before[-1:], *range(first, min(last + 1, len(lines)))]
    return "".join(hint(lines[number], f"Line {number + 1}") for number in numbers)


def explained(mistakes: Iterable[Mistake], text: str) -> Iterator[Mistake]:
    """Yields the mistakes in a recipe, `text`, and its overrides, with a hint on each line or override that has such
    characters, once."""
    lines, hinted = text.splitlines(), set[str]()
    for mistake in mistakes:
        number = re.search(r":(\d+)$", mistake.where)
        if number and int(number[1]) <= len(lines):
            more = hint(lines[int(number[1]) - 1], f"Line {number[1]}")
        else:
            override = re.fullmatch(r"override '(.*)'", mistake.where, re.S)
            more = hint(override[1], "It") if override else ""
        if more and more not in hinted:
            hinted.add(more)
            mistake = replace(mistake, message=mistake.message.removesuffix(".") + "." + more)
        yield mistake
