"""The JSON schema of a recipe, for completion and checks in editors with the YAML language server."""

from __future__ import annotations

from typing import Any

from paddle_dp.recipe.schema import DEFAULTS, Recipe
from paddle_dp.recipe.shelf_schema import EditorSchema


def json_schema() -> dict[str, Any]:
    """The schema with one variant for each part on each shelf. Imports all parts, and thus paddle."""
    schema = Recipe.model_json_schema(schema_generator=EditorSchema)
    schema["required"] = [key for key in schema["required"] if key not in DEFAULTS]
    for key, default in DEFAULTS.items():
        schema["properties"][key]["default"] = default
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
