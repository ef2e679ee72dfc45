"""The recipe's fields that hold a part: reading, writing and JSON schema by pydantic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from paddle_dp.part import SHELVES, Annotation, Groups, Part, Reading, find, names, read_part, summary
from paddle_dp.part.config import adapter, meanings
from paddle_dp.recipe import hf_config
from paddle_dp.units import Quantity


class EditorSchema(GenerateJsonSchema):
    """Pydantic's schema with the meaning of each setting, and a quantity's default as in YAML ("3 epochs")."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return _explained(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> dict[str, Any]:
        return _explained(super().model_schema(schema), schema["cls"])

    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Quantity) else super().encode_default(dft)


# The keys that every part of a shelf has in addition to its settings.
_SHARED_KEYS: dict[str, Any] = {"models": Annotation, "optimizers": Groups, "datasets": Reading}


def _explained(described: dict[str, Any], kind: Any) -> dict[str, Any]:
    """An object's schema with the meanings of its settings, which editors show next to the keys."""
    for name, meaning in meanings(kind).items():
        if meaning and name in described.get("properties", {}):
            described["properties"][name]["description"] = meaning
    return described


@dataclass(frozen=True)
class OnShelf:
    """Marks a field as a part of this shelf, or, if `listed`, as one of a list of its parts."""

    shelf: str
    listed: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        settings = core_schema.plain_serializer_function_ser_schema(lambda part: part.settings)
        return core_schema.with_info_plain_validator_function(self._read, serialization=settings)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """The schema of an object: `use` determines its other keys; a dotted name allows any keys."""
        known = names(self.shelf)
        use = {"anyOf": [{"enum": known}, {"type": "string", "pattern": r"\."}]}
        chosen = [{"if": _uses(name), "then": self._describe(name)} for name in known]
        return {"type": "object", "required": ["use"], "properties": {"use": use}, "allOf": chosen}

    def _read(self, value: Any, info: core_schema.ValidationInfo) -> Part:
        if isinstance(value, Part):
            return value
        prefix = self.shelf if self.listed else SHELVES[self.shelf]
        if self.listed and isinstance(value, dict):
            prefix = f"{prefix}.{value.get('use', '')}".rstrip(".")
        context = info.context or {}
        home: Path | None = context.get("home")
        return read_part(self.shelf, value, prefix, home, tries=context.get("tries", True))

    def _describe(self, name: str) -> dict[str, Any]:
        described = _schema_of(find(self.shelf, name))
        if (annotation := _SHARED_KEYS.get(self.shelf)) is not None:
            further = _schema_of(annotation)["properties"]
            described["properties"] = {**further, **described.get("properties", {})}
        if self.shelf == "models" and hf_config.has_table(find(self.shelf, name)):
            described["properties"][hf_config.KEY] = {"type": "string", "description": hf_config.MEANING}
        meaning = summary(self.shelf, name)
        return {
            **described, "title": name, "description": meaning,
            "properties": {"use": {"const": name, "description": meaning}, **described.get("properties", {})},
            "required": ["use", *described.get("required", [])],
        }  # fmt: skip


def _schema_of(kind: Any) -> dict[str, Any]:
    schema = adapter(kind).json_schema(schema_generator=EditorSchema)
    inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}))
    return inlined


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema with its references replaced: a recipe's schema has no room for nested definitions."""
    if isinstance(schema, list):
        return [_inlined(element, definitions) for element in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _uses(name: str) -> dict[str, Any]:
    return {"properties": {"use": {"const": name}}, "required": ["use"]}
