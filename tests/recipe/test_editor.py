"""The schema that an editor completes from: one variant for each part, told apart by `use`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paddle_dp.part import SHELVES, names
from paddle_dp.recipe import json_schema
from paddle_dp.units import Bytes, Duration, Every, Length, Recompute


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema()


def described(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """The schema of one part of a shelf."""
    found = schema["properties"][key]
    found = found.get("items", found)
    return next(option for option in found.get("anyOf", [found]) if "allOf" in option)


def variants(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """What each `use` of the shelf asks for, by JSON Schema's own rule: the `then` of every `if` that holds."""
    part = described(schema, key)
    uses = part["properties"]["use"]["anyOf"][0]["enum"]
    chosen = [
        [c["then"] for c in part["allOf"] if c["if"]["properties"]["use"]["const"] == use] for use in uses
    ]
    assert all(len(found) == 1 for found in chosen) and all(
        c["if"]["required"] == ["use"] for c in part["allOf"]
    )
    return [found[0] for found in chosen]


@pytest.mark.parametrize("shelf", SHELVES)
def test_use_decides_the_other_keys(schema: dict[str, Any], shelf: str) -> None:
    key = shelf if shelf in ("metrics", "callbacks") else SHELVES[shelf]
    assert described(schema, key)["required"] == ["use"]
    assert [v["properties"]["use"]["const"] for v in variants(schema, key)] == names(shelf)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (
            Length,
            ["20 steps", "1 epoch", "0.5 epochs", "1_000 steps"],
            ["20 stpes", "20", "steps", "every 2 steps"],
        ),
        (Every, ["50 steps", "every 2 epochs"], ["every steps", "evry 2 epochs"]),
        (Bytes, ["25 MB", "1e3B"], ["25 mb", "25"]),
        (Duration, ["120 s", "2 h"], ["2 hours", "120"]),
        (Recompute, ["none", "full", "every 2 blocks", "every 1 block"], ["every 0 blocks", "all"]),
    ],
)
def test_an_editor_knows_a_quantity_from_a_slip(kind: Any, right: list[str], wrong: list[str]) -> None:
    pattern = re.compile(kind.__get_pydantic_json_schema__(None, None)["pattern"])
    for text in right:
        assert pattern.search(text) and kind.parse(text)
    for text in wrong:
        assert not pattern.search(text)
        with pytest.raises(ValueError, match=r"quantity|is not one of"):
            kind.parse(text)


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
