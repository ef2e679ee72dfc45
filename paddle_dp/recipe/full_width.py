"""Finds full-width punctuation in a refused recipe: input methods for Chinese type `，：｛` where YAML has `,:{`. And
spaces that cannot be seen or are no spaces to YAML, which copied text has."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

_IRREGULAR = {"“": '"', "”": '"', "‘": "'", "’": "'", "、": ",", "【": "[", "】": "]", "\u3000": " "}
_ASCII = {chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)} | _IRREGULAR
_TABLE = str.maketrans(_ASCII)
_SYNTAX = set(",:{}[]\"'#-= ")  # of YAML and overrides: no other character can be the cause of their errors
_WIDE = f"(?:[０-９Ａ-Ｚａ-ｚ]+|[{re.escape(''.join(_ASCII))}])"
# Between two Chinese characters it is punctuation of a text.
_PUNCTUATION = re.compile(rf"(?<![^\x00-\x7f]){_WIDE}|{_WIDE}(?![^\x00-\x7f])")
_SPACE = "[\u00a0\u00ad\u2000-\u200f\u202f\u205f\u2060\ufeff]"
_SPACES = re.compile(rf"(?<![^\x00-\x7f]){_SPACE}|{_SPACE}(?![^\x00-\x7f])")
_TEXT = re.compile(r"""(?<!\w)(?:"(?:\\.|[^"\\])*"|'[^']*')|(?:^|(?<=\s))#.*""")  # quoted, or a comment


def value_hint(message: str, location: str, text: str) -> str:
    """Returns " Line 6 has the full-width '，': write ','." if `message`, on a key or value at `location` of the recipe
    `text` or in an override, quotes such characters from there, else "". Likewise for a space that is none to YAML."""
    number = re.search(r":(\d+)$", location)
    source = location if location.startswith("override '") else ""
    if number:
        source = "".join(text.splitlines()[int(number[1]) - 1 : int(number[1])])
    wide = [characters for characters in _PUNCTUATION.findall(message) if characters in source]
    subject = f"Line {number[1]}" if number else "It"
    names = [
        f"{unicodedata.name(character)} (U+{ord(character):04X})"
        for character in dict.fromkeys(_SPACES.findall(message))
        if character in source
    ]
    spaces = f" {subject} has the character {', '.join(names)}: delete it, or write ' '." if names else ""
    return _hint(wide, subject) + spaces


def yaml_hints(text: str, first: int = 0, last: int = 0, *, numbered: bool = True) -> str:
    """Returns the hints on what YAML refuses: an error in the line `last`, from 0, of something that begins in `first`.

    Any such character of YAML's syntax counts in the error's line; in the lines from the one before `first`, only where
    YAML would have that syntax. Not `numbered`: the text is an override.
    """
    lines = [*(_TEXT.sub(" ", line) for line in text.splitlines()), ""]
    before = [number for number in range(min(first, len(lines))) if lines[number].strip()][-1:]
    if before and _indent(lines[before[0]]) > _indent(lines[min(first, len(lines) - 1)]):
        before = []  # ended before the error, as a block of text
    hints = ""
    for number in [*before, *range(first, min(last + 1, len(lines)))]:
        above, line = "".join(lines[:number]), lines[number]
        wide = [match for match in _PUNCTUATION.finditer(line) if _ASCII.get(match[0]) in _SYNTAX]
        if number < last:
            wide = [m for m in wide if _separates(_ASCII[m[0]], line[: m.start()], above)]
        subject = f"Line {number + 1}" if numbered else "It"
        hints += _hint([match[0] for match in wide], subject, ", which may be the cause")
    return hints


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _separates(character: str, left: str, above: str) -> bool:
    """Whether YAML's `character` would be syntax behind `left`, in a line under `above`."""
    if character == ":":
        return re.fullmatch(r"\s*(?:- )?[^\s:]+", left) is not None
    if character == ",":
        text = above + left
        return sum(map(text.count, "[{［｛")) > sum(map(text.count, "]}］｝"))
    return character in "[{" and left.rstrip().endswith((":", "："))


def _hint(typed: Iterable[str], subject: str, doubt: str = "") -> str:
    wide = dict.fromkeys(typed)
    names = ", ".join(f"'{characters}'" for characters in wide)
    replacements = ", ".join(repr(characters.translate(_TABLE)) for characters in wide)
    return f" {subject} has the full-width {names}{doubt}: write {replacements}." if wide else ""
