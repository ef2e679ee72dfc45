"""Settings are held to their Config: strictly, all mistakes at once, in plain words, each with its keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.part import ErrorContext, read_settings
from paddle_dp.part.settings import complaint, keys_of
from paddle_dp.units import Every, Length, Positive

GPT = ErrorContext(subject="model gpt", prefix="model")


@dataclass(frozen=True, kw_only=True)
class Inner:
    kind: Literal["cut", "whole"] = "cut"
    layers: Literal[18, 34] = 18


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab: Positive
    width: int = 64
    rate: float | None = 0.1
    tied: bool = False
    title: str = ""
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, int] = (1, 2)
    either: int | str = 1
    every: Every | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError("width: is odd")
        if self.width == 666:
            raise ValueError("no luck with this")


def mistakes(**settings: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        read_settings(Config, {"vocab": 8, **settings}, GPT)
    return [mistake.message for mistake in caught.value.mistakes]


def test_right_settings_become_the_config() -> None:
    made = read_settings(
        Config, {"vocab": 8, "sizes": [3], "every": "5 steps", "inner": {"kind": "whole"}}, GPT
    )
    assert made == Config(vocab=8, sizes=(3,), every=Every(5, "steps"), inner=Inner(kind="whole"))


def test_quantities_may_be_given_as_such() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Timed:
        length: Length

    assert read_settings(Timed, {"length": Length(2, "epochs")}, GPT).length == Length(2, "epochs")


def test_a_whole_number_is_a_number() -> None:
    assert read_settings(Config, {"vocab": 8, "rate": 1}, GPT).rate == 1.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": "64"}, "model.width: '64' is not a whole number: leave the quotes out"),
        ({"width": True}, "model.width: true is not a whole number"),
        ({"width": 1.5}, "model.width: 1.5 is not a whole number"),
        ({"rate": "3e-4"}, "model.rate: '3e-4' is not a number: leave the quotes out"),
        ({"rate": float("nan")}, "model.rate: NaN is not a finite number"),
        ({"width": 1e3}, "model.width: 1000.0 is not a whole number: write 1000"),
        ({"tied": 1}, "model.tied: 1 is not true or false"),
        ({"tied": "yes"}, "model.tied: 'yes' is not true or false"),
        ({"tied": "true"}, "model.tied: 'true' is not true or false: leave the quotes out"),
        ({"title": 3}, "model.title: 3 is not a text: write '3', in quotes"),
        ({"title": [1]}, "model.title: [1] is not a text"),
        ({"sizes": 3}, "model.sizes: 3 is not a list"),
        ({"sizes": [1, "x"]}, "model.sizes.1: 'x' is not a whole number"),
        ({"pair": [1]}, "model.pair: [1] holds too few values"),
        ({"pair": [1, 2, 3]}, "model.pair: [1, 2, 3] holds more than 2 values"),
        (
            {"either": 1.5},
            "model.either: 1.5 is not a whole number / 1.5 is not a text: write '1.5', in quotes",
        ),
        ({"vocab": 0}, "model.vocab: 0 is less than 1"),
        (
            {"inner": {"kind": "cutt"}},
            "model.inner.kind: 'cutt' is not one of 'cut' or 'whole'. Did you mean 'cut'?",
        ),
        ({"inner": {"layers": 20}}, "model.inner.layers: 20 is not one of 18 or 34"),
        ({"inner": {"sort": 1}}, "model.inner has no setting 'sort'. It takes kind, layers."),
        ({"inner": 3}, "model.inner: 3 is not a group of settings (name: value)"),
        ({"width": 3}, "model.width: is odd"),
        ({"width": 666}, "model: no luck with this"),
    ],
)
def test_one_mistake(settings: dict[str, Any], said: str) -> None:
    assert mistakes(**settings) == [said]


def test_an_unknown_setting_is_told_with_the_near_miss_and_all_that_it_takes() -> None:
    assert mistakes(widht=3) == [
        "model gpt has no setting 'widht'. Did you mean 'width'? "
        "It takes either, every, inner, pair, rate, sizes, tied, title, vocab, width."
    ]


def test_all_mistakes_are_told_at_once_with_their_keys() -> None:
    with pytest.raises(RecipeError) as caught:
        read_settings(Config, {"width": "a", "inner": {"kind": 1}, "wdth": 3, "every": 5}, GPT)
    found = {mistake.path for mistake in caught.value.mistakes}
    assert found == {("width",), ("inner", "kind"), ("wdth",), ("every",), ()}
    assert "model gpt needs 'vocab'" in str(caught.value)


def test_what_is_needed_is_told_with_an_example() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Timed:
        length: Length

    with pytest.raises(RecipeError, match=r"model gpt needs 'length' \(such as 3 epochs\)"):
        read_settings(Timed, {}, GPT)


def test_settings_that_are_no_group() -> None:
    with pytest.raises(RecipeError, match=r"model gpt: 3 is not a group of settings"):
        read_settings(Config, 3, ErrorContext(subject="model gpt"))


def test_an_annotation_that_cannot_be_read_is_the_parts_mistake() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken:
        width: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(RecipeError, match="model gpt: its Config has an annotation that cannot be read"):
        read_settings(Broken, {}, GPT)


def test_a_complaint_of_an_unknown_kind_has_pydantics_words() -> None:
    detail = {"type": "something_new", "input": 1, "msg": "pydantic's own words"}
    assert complaint(detail, "a") == "a: 1 is wrong: pydantic's own words"


def test_names_of_union_options_are_no_keys() -> None:
    assert keys_of(("a", "int"), {"a": "x"}, leaf=False) == ("a",)
    assert keys_of(("a", 1, "list[int]", 0), {"a": [1, ["x"]]}, leaf=False) == ("a", 1, 0)


def test_a_missing_key_is_a_key_where_a_group_could_hold_it() -> None:
    assert keys_of(("a", "b"), {"a": {}}, leaf=True) == ("a", "b")
    assert keys_of(("a", "b"), {"a": {}}, leaf=False) == ("a",)
    assert keys_of(("a", 1), {"a": [1]}, leaf=True) == ("a",)
