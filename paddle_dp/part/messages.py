"""Turns pydantic's errors into sentences for a writer of YAML."""

from __future__ import annotations

import json
import re
from typing import Any

from paddle_dp.errors import near
from paddle_dp.part.aliases import RENAMED_VALUES

Keys = tuple[str | int, ...]

# Pydantic's name of an error → the sentence's predicate, with pydantic's numbers filled in.
PREDICATES: dict[str, str] = {
    "int_type": "is not a whole number",
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "float_parsing": "is not a number",
    "finite_number": "is not a finite number",
    "string_type": "is not a text",
    "bool_type": "is not true or false",
    "bool_parsing": "is not true or false",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "dict_type": "is not a mapping",
    "dataclass_type": "is not a group of settings (name: value)",
    "model_type": "is not a group of settings (name: value)",
    "model_attributes_type": "is not a group of settings (name: value)",
    "none_required": "is not null",
    "literal_error": "is not one of {expected}",
    "greater_than": "is not more than {gt}",
    "greater_than_equal": "is less than {ge}",
    "less_than": "is not less than {lt}",
    "less_than_equal": "is more than {le}",
    "too_short": "holds fewer than {min_length} values",
    "too_long": "holds more than {max_length} values",
    "missing": "holds too few values",
}

_NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")
_UNQUOTED = {"int_type": _NUMBER, "float_type": _NUMBER, "bool_type": re.compile("true|false")}


def complaint(detail: dict[str, Any], key: str) -> str:
    """The sentence for an item of ValidationError.errors(): `train.batch: 'abc' is not a whole number`."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    predicate = PREDICATES[kind].format(**context) if kind in PREDICATES else f"is wrong: {detail['msg']}"
    return f"{key}: {show(value)} {predicate}{_hint(kind, value, context)}"


def show(value: Any) -> str:
    """A value as one would write it in YAML, cut to 60 characters."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


def keys_of(location: tuple[str | int, ...], values: Any, *, leaf: bool) -> Keys:
    """The keys in pydantic's location, without its union options. `leaf`: the last key may be missing."""
    path: list[str | int] = []
    for number, key in enumerate(location):
        keys = values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
        if key in keys:
            values = values[key]
        elif not (leaf and number == len(location) - 1 and isinstance(values, dict)):
            continue
        path.append(key)
    return tuple(path)


def _hint(kind: str, value: Any, context: dict[str, Any]) -> str:
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", context["expected"])
        if (new := RENAMED_VALUES.get(str(value))) in options:
            return f". It is now '{new}'"
        guess = near(str(value), options) or RENAMED_VALUES.get(near(str(value), RENAMED_VALUES) or "")
        return f". Did you mean '{guess}'?" if guess else ""
    if kind == "string_type" and not isinstance(value, list | dict):
        return f": write '{json.dumps(value)}', in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    unquoted = _UNQUOTED.get(kind) if isinstance(value, str) else None
    return ": leave the quotes out" if unquoted and unquoted.fullmatch(value) else ""
