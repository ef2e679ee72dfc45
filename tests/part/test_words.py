"""pydantic's findings in plain words, and the keys among its locations."""

from __future__ import annotations

import pytest

from paddle_dp.part.config import show
from paddle_dp.part.settings import complaint, keys_of


@pytest.mark.parametrize(
    ("kind", "value", "context", "said"),
    [
        ("int_type", "abc", {}, "a: 'abc' is not a whole number"),
        ("int_type", "64", {}, "a: '64' is not a whole number: leave the quotes out"),
        ("int_type", 1e3, {}, "a: 1000.0 is not a whole number: write 1000"),
        ("int_type", True, {}, "a: true is not a whole number"),
        ("float_type", "3e-4", {}, "a: '3e-4' is not a number: leave the quotes out"),
        ("bool_type", "true", {}, "a: 'true' is not true or false: leave the quotes out"),
        ("bool_type", "yes", {}, "a: 'yes' is not true or false"),
        ("string_type", 1.5, {}, "a: 1.5 is not a text: write '1.5', in quotes"),
        ("string_type", [1], {}, "a: [1] is not a text"),
        ("greater_than_equal", 0, {"ge": 1}, "a: 0 is less than 1"),
        ("literal_error", "sume", {"expected": "'sum'"}, "a: 'sume' is not one of 'sum'. Did you mean 'sum'?"),
        ("literal_error", 20, {"expected": "18 or 34"}, "a: 20 is not one of 18 or 34"),
        ("something_new", 1, {}, "a: 1 is wrong: pydantic's own words"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_value_and_what_it_is_not(
    kind: str, value: object, context: dict[str, object], said: str
) -> None:
    detail = {"type": kind, "input": value, "ctx": context, "msg": "pydantic's own words"}
    assert complaint(detail, "a") == said


def test_a_long_value_is_cut() -> None:
    assert len(show("x" * 500)) < 70 and show({"a": None}) == '{"a": null}'


def test_names_of_union_options_are_no_keys() -> None:
    assert keys_of(("a", "int"), {"a": "x"}, leaf=False) == ("a",)
    assert keys_of(("a", 1, "list[int]", 0), {"a": [1, ["x"]]}, leaf=False) == ("a", 1, 0)


def test_a_missing_key_is_a_key_where_a_group_could_hold_it() -> None:
    assert keys_of(("a", "b"), {"a": {}}, leaf=True) == ("a", "b")
    assert keys_of(("a", "b"), {"a": {}}, leaf=False) == ("a",)
    assert keys_of(("a", 1), {"a": [1]}, leaf=True) == ("a",)
