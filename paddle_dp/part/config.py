"""What a Config says of itself: the settings it takes, their types, their defaults, and what checks them."""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

from paddle_dp.part.types import in_words
from paddle_dp.part.words import Keys, show

_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def adapter(kind: Any) -> TypeAdapter[Any]:
    """What checks and writes settings of this Config; a plain dataclass is told to refuse unknown ones."""
    if is_dataclass(kind) and not hasattr(kind, "__pydantic_config__"):
        kind.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[union-attr]
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def fields_of(kind: Any) -> dict[str, Any]:
    """The settings that a Config, or the Config inside an annotation such as `Config | None`, takes."""
    for option in (kind, *get_args(kind)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return {name: field.annotation for name, field in option.model_fields.items()}
        if isinstance(option, type) and is_dataclass(option):
            hints = get_type_hints(option)
            return {field.name: hints[field.name] for field in fields(option) if field.init}
    return {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting for a person to read; `default` is None when it must be given."""

    name: str
    type: str
    default: str | None


def settings_of(kind: Any) -> list[Setting]:
    """What a Config takes, in its own order."""
    if not is_dataclass(kind):
        return [
            Setting(name=n, type=in_words(f.annotation), default=None if f.is_required() else show(f.default))
            for n, f in kind.model_fields.items()
        ]
    hints = get_type_hints(kind, include_extras=True)
    return [
        Setting(name=f.name, type=in_words(hints[f.name]), default=_default(f))
        for f in fields(kind)
        if f.init
    ]


def setting_at(kind: Any, path: Keys) -> Any:
    """The annotation that a path of keys leads to, or None."""
    for key in path:
        kind = fields_of(kind).get(str(key))
    return kind


def _default(setting: Field[Any]) -> str | None:
    value = setting.default
    if setting.default_factory is not MISSING:
        value = setting.default_factory()
    if value is MISSING:
        return None
    return str(value) if hasattr(value, "example") else show(value)
