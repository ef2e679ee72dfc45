"""Checks settings against their Config with pydantic, and reports all mistakes at once.

Settings are passed as JSON, so that pydantic's strict mode accepts a list for a tuple, but no other value of a wrong
type (no text for a number, no number for a text, no 1 for true).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.errors import PydanticUserError

from paddle_dp.errors import Mistake, RecipeError, did_you_mean, near
from paddle_dp.part.aliases import find_hint
from paddle_dp.part.config import Keys, adapter, fields_of, setting_at, show
from paddle_dp.part.shelf import SHELVES
from paddle_dp.units import Quantity

T = TypeVar("T")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")

# Pydantic's name of an error → the sentence's predicate, with pydantic's numbers filled in.
PREDICATES: dict[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "is not a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "is not a number"),
    "finite_number": "is not a finite number",
    "string_type": "is not a text",
    **dict.fromkeys(("bool_type", "bool_parsing"), "is not true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "is not a list"),
    "dict_type": "is not a mapping",
    **dict.fromkeys(
        ("dataclass_type", "model_type", "model_attributes_type"), "is not a group of settings (name: value)"
    ),
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


@dataclass(frozen=True, kw_only=True)
class ErrorContext:
    """The owner of settings in messages: a subject ("model gpt has no setting …") and a prefix ("model.width: …").

    `hint` returns a sentence on a setting that this owner lacks, or "".
    """

    subject: str
    prefix: str = ""
    hint: Callable[[str], str] = lambda name: ""

    def dotted(self, path: Keys) -> str:
        return ".".join(map(str, (self.prefix, *path) if self.prefix else path))

    def subject_at(self, path: Keys) -> str:
        return self.dotted(path) if path else self.subject


def read_settings(
    kind: type[T], values: Any, owner: ErrorContext, home: Path | None = None, *, tries: bool = True
) -> T:
    """Makes a `kind` from settings read from YAML. Raises RecipeError with every mistake and its path.

    `home` and `tries` are passed to the parts in a recipe (`read_part`), `owner.prefix` to the parts in a part.
    """
    text = json.dumps(values, default=str)
    try:
        context = {"home": home, "tries": tries, "prefix": owner.prefix}
        settings: T = adapter(kind).validate_json(text, strict=True, context=context)
        return settings
    except ValidationError as error:
        raise RecipeError(_mistakes(error, kind, json.loads(text), owner)) from None
    except (PydanticUserError, NameError) as error:
        message = f"{owner.subject}: its Config has an annotation that cannot be read: {error}"
        raise RecipeError([Mistake(where="", message=message)]) from error


def settings_of_objects(kind: type[T], values: dict[str, Any], owner: ErrorContext) -> T:
    """Makes a `kind` from settings that a script gives as Python objects. Raises RecipeError with every mistake."""
    try:
        return kind(**values)
    except ValidationError as error:
        raise RecipeError(_mistakes(error, kind, values, owner)) from None


def _mistakes(error: ValidationError, kind: Any, values: Any, owner: ErrorContext) -> list[Mistake]:
    mistakes_by_path: dict[Keys, list[Mistake]] = {}
    details = [
        (detail, keys_of(detail["loc"], values, leaf=detail["type"] in (*UNKNOWN, "missing")))
        for detail in error.errors(include_url=False)
    ]
    misspelt = {
        (*path[:-1], near(str(path[-1]), _takes(kind, path[:-1])))
        for detail, path in details
        if detail["type"] in UNKNOWN
    }
    for detail, path in details:
        if detail["type"] == "missing" and path in misspelt:
            continue  # the sentence on its other spelling says enough
        for mistake in _mistake(dict(detail), path, kind, owner):
            same = mistakes_by_path.setdefault(mistake.path, [])
            if mistake not in same:
                same.append(mistake)
    return [_joined(same) for same in mistakes_by_path.values()]


def _joined(same: list[Mistake]) -> Mistake:
    """Joins the mistakes that pydantic finds in one value, one for each type of a union."""
    first = same[0]
    rest = (m.message.removeprefix(first.message.split(": ")[0] + ": ") for m in same[1:])
    return replace(first, message=" / ".join([first.message, *rest]))


def _mistake(detail: dict[str, Any], path: Keys, kind: Any, owner: ErrorContext) -> list[Mistake]:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, RecipeError):  # a part's mistakes keep their text
        return [
            replace(m, path=(*path, *m.path), message=_with_key(m.message, path, owner))
            for m in cause.mistakes
        ]
    group, name = path[:-1], path[-1] if path else ""
    if detail["type"] in UNKNOWN:
        text = f"{owner.subject_at(group)} has no setting '{name}'.{_known_elsewhere(path, owner, _takes(kind, group))}"
    elif detail["type"] == "missing" and isinstance(detail["loc"][-1], str):
        text = f"{owner.subject_at(group)} needs '{name}'{_for_example(kind, path)}"
        path = group
    elif isinstance(cause, ValueError):
        return [_from_post_init(str(cause), kind, path, owner)]
    else:
        text = complaint(detail, owner.dotted(path) or owner.subject)
    return [Mistake(where="", message=text, path=path)]


def _with_key(message: str, path: Keys, owner: ErrorContext) -> str:
    """The message on a part, which knows its key's last word alone, with the whole key: turns' are deeper."""
    key, name = owner.dotted(path), str(path[-1]) if path else ""
    if name not in SHELVES.values() or name == key or message.startswith(key):
        return message
    if re.match(rf"{re.escape(name)}[.: ]", message):
        return key + message[len(name) :]
    return f"{key}: {message}"


def _known_elsewhere(path: Keys, owner: ErrorContext, takes: list[str]) -> str:
    """The hint for an unknown setting: another part, or another group of the recipe, has it under this or another name;
    else the most similar setting of this owner."""
    name = str(path[-1])
    hint = owner.hint(name) if len(path) == 1 else ""
    in_this_group = find_hint(owner.dotted(path), exactly=True)
    known = in_this_group or find_hint(name, exactly=bool(hint or near(name, takes)))
    group, _, last = (known.key if known else "").rpartition(".")
    if known is None or known.key == owner.dotted(path) or (hint and last == name):
        return hint + did_you_mean(name, takes)
    owner_hint = owner.hint(last) if group == owner.prefix and last not in takes else ""
    misspelt = known.name == last and not find_hint(name, exactly=True)  # a recipe's own key
    hint += f" Did you mean '{last if group == owner.prefix else known.key}'?" if misspelt else known.sentence
    return f"{hint}{owner_hint} {owner.subject_at(path[:-1])} takes {', '.join(takes) or 'nothing'}."


def _from_post_init(text: str, kind: Any, path: Keys, owner: ErrorContext) -> Mistake:
    """Locates `ValueError("width: is odd")`, raised by a Config, at its setting width."""
    name, colon, rest = text.partition(": ")
    if colon and name in _takes(kind, path):
        path, text = (*path, name), rest
    return Mistake(where="", message=f"{owner.dotted(path) or owner.subject}: {text}", path=path)


def _takes(kind: Any, path: Keys) -> list[str]:
    return sorted(fields_of(setting_at(kind, path)))


def _for_example(kind: Any, path: Keys) -> str:
    target = setting_at(kind, path)
    return f" (such as {target.example})" if isinstance(target, type) and issubclass(target, Quantity) else ""


def complaint(detail: dict[str, Any], key: str) -> str:
    """The sentence for an item of ValidationError.errors(): `train.batch: 'abc' is not a whole number`."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    predicate = PREDICATES[kind].format(**context) if kind in PREDICATES else f"is wrong: {detail['msg']}"
    return f"{key}: {show(value)} {predicate}{_hint(kind, value, context)}"


def _hint(kind: str, value: Any, context: dict[str, Any]) -> str:
    if kind == "literal_error":
        guess = near(str(value), re.findall(r"'([^']*)'", context["expected"]))
        return f". Did you mean '{guess}'?" if guess else ""
    if kind == "string_type" and not isinstance(value, list | dict):
        return f": write '{json.dumps(value)}', in quotes"
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f": write {int(value)}"
    unquoted = _UNQUOTED.get(kind) if isinstance(value, str) else None
    return ": leave the quotes out" if unquoted and unquoted.fullmatch(value) else ""


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
