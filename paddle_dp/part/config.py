"""Inspects a Config: its settings, their types, defaults and meanings, and the pydantic adapter that checks them.

Help describes types in words: "number, 0 or more", "whole number or null", "one of sum, mean".
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, TypeAdapter

from paddle_dp.units import Quantity

Keys = tuple[str | int, ...]

_PLAIN: dict[Any, str] = {
    int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "null", Any: "anything",
}  # fmt: skip
_BOUNDS: dict[type, str] = {
    Ge: "{0.ge} or more", Gt: "more than {0.gt}", Le: "{0.le} or less", Lt: "less than {0.lt}",
}  # fmt: skip


def describe_type(annotation: Any) -> str:
    """Describes the values of a setting of this type in words."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, Quantity):
        return f"quantity such as {annotation.example}"
    if isinstance(annotation, type) and is_dataclass(annotation):
        return f"mapping of {', '.join(field.name for field in fields(annotation))}"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if words := [bound for bound in annotation.__metadata__ if isinstance(bound, str)]:
            return str(words[0])
        bounds = [_BOUNDS[type(b)].format(b) for b in annotation.__metadata__ if type(b) in _BOUNDS]
        return ", ".join([describe_type(inner[0]), *bounds])
    if origin in (Union, UnionType):
        return " or ".join(map(describe_type, inner))
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (list, tuple):
        return "list: " + "; ".join(describe_type(each) for each in inner if each is not Ellipsis)
    if origin is dict:
        return f"mapping: {describe_type(inner[0])} to {describe_type(inner[1])}"
    return getattr(annotation, "__name__", str(annotation))


def show(value: Any) -> str:
    """A value as one would write it in YAML, cut to 60 characters."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: Any) -> TypeAdapter[Any]:
    """The adapter that checks and writes this Config's settings. It makes a plain dataclass refuse unknown settings."""
    if is_dataclass(kind) and not hasattr(kind, "__pydantic_config__"):
        settings = ConfigDict(extra="forbid", allow_inf_nan=False, alias_generator=in_yaml)
        kind.__pydantic_config__ = settings  # type: ignore[union-attr]
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def in_yaml(field: str) -> str:
    """The setting's name in YAML, without the underscore of a field that avoids a Python keyword, `async_`."""
    return field[:-1] if field.endswith("_") and keyword.iskeyword(field[:-1]) else field


def fields_of(kind: Any) -> dict[str, Any]:
    """The settings, name → type, of a Config, or of the Config in an annotation like `Config | None`."""
    for option in (kind, *get_args(kind)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return {name: field.annotation for name, field in option.model_fields.items()}
        if isinstance(option, type) and is_dataclass(option):
            hints = get_type_hints(option)
            return {in_yaml(field.name): hints[field.name] for field in fields(option) if field.init}
    return {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as text for help; `default` is None if it is required, `meaning` one or two sentences."""

    name: str
    type: str
    default: str | None
    meaning: str = ""


@cache
def meanings(kind: type[Any]) -> dict[str, str]:
    """The meanings of a Config's settings by name: the string after each field, base classes included."""
    meaning_by_name: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not vars(base).get("__annotations__"):
            continue
        try:
            (body,) = ast.parse(dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # a class made at run time has no source
            continue
        for field, following in pairwise(body.body if isinstance(body, ast.ClassDef) else ()):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                name = in_yaml(field.target.id)
                meaning_by_name.setdefault(name, "")
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    meaning_by_name[name] = " ".join(str(following.value.value).split())
    return meaning_by_name


def settings_of(kind: Any) -> list[Setting]:
    """A Config's settings, its class's before its bases'."""
    means = meanings(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        annotations = vars(kind).get("__annotations__", {})
        ordered = sorted(fields(kind), key=lambda f: f.name not in annotations)
        rows = [(in_yaml(f.name), hints[f.name], _default(f)) for f in ordered if f.init]
    else:
        named = kind.model_fields.items()
        rows = [(n, f.annotation, None if f.is_required() else show(f.default)) for n, f in named]
    return [
        Setting(name=name, type=describe_type(annotation), default=default, meaning=means.get(name, ""))
        for name, annotation, default in rows
    ]


def setting_at(kind: Any, path: Keys) -> Any:
    """The type of the setting at a path of keys, or None."""
    for key in path:
        origin = get_origin(kind)
        if isinstance(key, int) and origin in (tuple, list):
            kind = get_args(kind)[0]
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            kind = get_args(kind)[1]
        else:
            kind = fields_of(kind).get(str(key))
    return kind


def _default(setting: Field[Any]) -> str | None:
    value = setting.default
    if setting.default_factory is not MISSING:
        value = setting.default_factory()
    if value is MISSING:
        return None
    return str(value) if isinstance(value, Quantity) else show(value)
