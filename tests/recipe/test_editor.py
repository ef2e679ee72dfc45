"""The schema that an editor completes from: one variant for each part, told apart by `use`."""

from __future__ import annotations

from typing import Any

import pytest

from paddle_dp.part import SHELVES, names
from paddle_dp.recipe import json_schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def variants(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = schema["properties"][key]
    found = found.get("items", found)
    options = found["anyOf"]
    return [inner for option in options for inner in option.get("anyOf", [option])]


@pytest.mark.parametrize("shelf", SHELVES)
def test_every_part_is_a_variant(schema: dict[str, Any], shelf: str) -> None:
    key = "callbacks" if shelf == "callbacks" else SHELVES[shelf]
    uses = [v["properties"]["use"].get("const") for v in variants(schema, key) if "properties" in v]
    assert set(uses) - {None} == set(names(shelf))


def test_a_variant_tells_help_settings_and_what_is_needed(schema: dict[str, Any]) -> None:
    (cosine,) = [v for v in variants(schema, "schedule") if v.get("title") == "cosine"]
    assert cosine["required"] == ["use", "learning_rate"] and cosine["additionalProperties"] is False
    assert cosine["description"].startswith("Half a cosine")
    assert cosine["properties"]["warmup"]["default"] == "0 steps"
    assert cosine["properties"]["learning_rate"]["description"] == "The peak: the rate after the warm-up."
    assert schema["properties"]["output_dir"]["description"] == "The run's folder; `runs/<name>` by default."
    batch = schema["$defs"]["Train"]["properties"]["batch"]
    assert batch["description"].startswith("Samples per update, over **all** ranks")


def test_what_has_a_default_is_not_required(schema: dict[str, Any]) -> None:
    assert set(schema["required"]) == {"model", "dataset", "optimizer", "train"}
    assert schema["properties"]["strategy"]["default"] == {"use": "data_parallel"}


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    def references(node: Any) -> list[str]:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        own = [node["$ref"]] if isinstance(node, dict) and isinstance(node.get("$ref"), str) else []
        return [*own, *(r for child in inner for r in references(child))]

    assert {r.removeprefix("#/$defs/") for r in references(schema)} <= set(schema["$defs"])
