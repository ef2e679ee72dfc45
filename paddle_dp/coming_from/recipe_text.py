"""The text of a recipe that was made of another tool's configuration, with a comment for each key that it lacks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_dp.coming_from.configuration import Configuration, Remark
from paddle_dp.text import plural

_PLAIN = re.compile(r"[A-Za-z_./][\w./*-]*( [\w./-]+)*|\d+ [a-z]+")
_SECRET = re.compile(r"(?i)(token|api_?key|secret|password)$")
_NO_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
WIDTH, MOST_NAMED = 120, 3


def recipe_text(
    recipe: Mapping[str, Any], configuration: Configuration, tool: str, commands: Sequence[str]
) -> str:
    """YAML with one line for each section. Comments before it have `commands` and the lost keys, comments after it the
    keys without a counterpart."""
    lines = [f"# {configuration.name} of {tool}, by paddle-dp import.", *(f"#   {each}" for each in commands)]
    lines = [_printable(line) for line in lines]
    lines += _remarks("Not honoured, so something else is learned", configuration.lost, configuration)
    lines += ["# To fill in:"] * bool(configuration.to_fill)
    lines += [line for each in configuration.to_fill for line in _wrapped(each)]
    lines += ["# Different by design:"] * bool(configuration.differences)
    lines += [line for each in configuration.differences for line in _wrapped(each)]
    for key, value in recipe.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"  - {_flow(each)}" for each in value)]
        else:
            lines.append(f"{key}: {_flow(value)}")
    title = "Without a counterpart; nothing that is learned depends on them"
    return "\n".join([*lines, *_remarks(title, configuration.unused, configuration)]) + "\n"


def summary(configuration: Configuration) -> str:
    """ "61 keys: 24 carried over, 35 without a counterpart, 2 not honoured"."""
    lost, unused = (sum(len(each.keys) for each in r) for r in (configuration.lost, configuration.unused))
    count = plural(len(configuration.values), "key")
    return f"{count}: {len(configuration.carried)} carried over, {unused} without a counterpart, {lost} not honoured"


def _remarks(title: str, remarks: Sequence[Remark], configuration: Configuration) -> list[str]:
    if not remarks:
        return []
    lines = [f"# {title}:"]
    for remark in remarks:
        named = ", ".join(f"{key}: {_shown(key, configuration.values[key])}" for key in remark.keys)
        if len(remark.keys) > MOST_NAMED:
            named = f"{remark.pattern}, {len(remark.keys)} keys" if remark.pattern else ", ".join(remark.keys)
        lines += _wrapped(f"{named} ({remark.reason})")
    return lines


def _shown(key: str, value: Any) -> str:
    """A key's value, but no password: a recipe is shared."""
    return "(left out)" if _SECRET.search(key) and isinstance(value, str) else _flow(value)


def _printable(text: str) -> str:
    """The text with a space for each letter that cannot be printed, as it may end a line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _wrapped(text: str) -> list[str]:
    """Comment lines; only at spaces."""
    import textwrap

    return textwrap.wrap(
        _printable(text),
        WIDTH,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _flow(value: Any) -> str:
    """YAML in one line: {use: momentum, momentum: 0.9}."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _NO_TEXT
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
