"""What a Config says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Gt
from pydantic import BaseModel

from paddle_dp.part.config import Setting, adapter, describe_type, fields_of, setting_at, settings_of, show
from paddle_dp.units import Bytes, Every, Positive, Probability


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int


@dataclass(frozen=True, kw_only=True)
class Config:
    width: Positive
    comm_buffer_size: Bytes = Bytes.parse("1 MB")
    sizes: list[int] = field(default_factory=lambda: [1])
    inner: Inner | None = None
    derived: int = field(default=3, init=False)


class Plain(BaseModel):
    width: int
    title: str = "x"


def test_settings_in_the_order_of_the_file() -> None:
    assert settings_of(Config) == [
        Setting(name="width", type="whole number, 1 or more", default=None),
        Setting(name="comm_buffer_size", type="quantity such as 25 MB", default="1 MB"),
        Setting(name="sizes", type="list: whole number", default="[1]"),
        Setting(name="inner", type="mapping of depth or null", default="null"),
    ]


def test_settings_of_a_pydantic_model() -> None:
    assert [(s.name, s.default) for s in settings_of(Plain)] == [("width", None), ("title", "'x'")]


def test_keys_lead_to_settings_of_settings() -> None:
    assert list(fields_of(setting_at(Config, ("inner",)))) == ["depth"]
    assert setting_at(Config, ("inner", "depth")) is int
    assert setting_at(Config, ("outer", "depth")) is None


def test_a_config_is_told_once_to_refuse_the_unknown() -> None:
    assert adapter(Config) is adapter(Config)
    assert adapter(Config).json_schema()["additionalProperties"] is False


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (int, "whole number"),
        (str | None, "text or null"),
        (Positive, "whole number, 1 or more"),
        (Probability, "number, 0 or more, less than 1"),
        (Annotated[float, Gt(0)] | None, "number, more than 0 or null"),
        (Literal["sum", "mean"], "one of sum, mean"),
        (Bytes, "quantity such as 25 MB"),
        (Every | None, "quantity such as 50 steps or null"),
        (tuple[int, ...], "list: whole number"),
        (tuple[int, str], "list: whole number; text"),
        (dict[str, float], "mapping: text to number"),
        (Any, "anything"),
        (bytes, "bytes"),
    ],
)
def test_a_type_is_described_in_words(kind: Any, said: str) -> None:
    assert describe_type(kind) == said


def test_a_long_value_is_cut() -> None:
    assert len(show("x" * 500)) < 70 and show({"a": None}) == '{"a": null}'
