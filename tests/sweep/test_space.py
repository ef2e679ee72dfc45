"""The axes of a sweep are read by a grammar; what it cannot mean is refused with a way to say it."""

from __future__ import annotations

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.sweep.space import Axis, all_settings, combinations, labels, overrides, read_axes, shown


def axis(text: str) -> Axis:
    return read_axes([text])[0][0]


def test_a_list_has_choices_in_yaml() -> None:
    assert axis("a.b=[0, 0.05, null, true, 3 epochs, [1, 2]]").choices == (
        "0", "0.05", "null", "true", '"3 epochs"', "[1, 2]",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=int(2, 8, 3)", ("2", "5", "8")), ("k=int(-1,1)", ("-1", "0", "1")), ("k=[0.1]", ("0.1",)),
        ("k=uniform(0, 1)", None), ("k=loguniform(1e-4,.1)", None), ("k=int(0, 1000000)", None),
    ],
)  # fmt: skip
def test_some_axes_can_be_counted(text: str, values: tuple[str, ...] | None) -> None:
    assert axis(text).values == values
    assert combinations([axis(text)]) == (values and len(values))


def test_a_check_takes_both_ends_and_a_number_between_them() -> None:
    """The number between is not round, so a key that takes whole numbers refuses `uniform`."""
    assert axis("k=uniform(16, 64)").samples == ("16.0", "45.665632", "64.0")
    assert axis("k=int(16, 64, 16)").samples == ("16", "48", "64")
    low, middle, high = map(float, axis("k=loguniform(1e-4, 1e-1)").samples)
    assert (low, high) == (1e-4, 1e-1) and middle == pytest.approx(7.15e-3, rel=1e-3)


def test_combinations_run_the_last_axis_first() -> None:
    axes, settings = read_axes(["a=[1, 2]", "train.batch=8", "b=int(3, 4)"])
    assert settings == ("train.batch=8",)
    assert list(all_settings(axes)) == [("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")]
    assert combinations(axes) == 4
    assert overrides(axes, ("2", "3")) == ("a=2", "b=3")


def test_labels_are_short_and_different() -> None:
    axes, _ = read_axes(["schedule.learning_rate=[1, 2]", "a.every=[1]", "b.every=[2]"])
    assert labels(axes) == ["learning_rate", "a.every", "b.every"]
    assert [*map(shown, ("0.0012345678", '"cosine"', "16", "[1, 2]"))] == [
        "0.001235",
        "cosine",
        "16",
        "[1, 2]",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("k=loguniorm(1, 2)", "there is no range 'loguniorm'. Did you mean 'loguniform'?"),
        ("k=loguniform(0, 1)", "0 has no logarithm"),
        ("k=uniform(1, 0)", "the first number is the smaller end"),
        ("k=uniform(1, 1)", "the first number is the smaller end"),
        ("k=uniform(0, 1e999)", "the first number is the smaller end"),
        ("k=uniform(0)", "uniform takes numbers, such as uniform(0, 0.5)"),
        ("k=int(0, 1.5)", "int takes integers"),
        ("k=int(16, 64, 7)", "steps of 7 do not lead from 16 to 64"),
        ("k=logint(1, 4, 2)", "logint takes integers, such as"),
        ("k=uniform(0, __import__('os').getpid())", "uniform takes numbers"),
        ("k=uniform(0, 1", "a bracket is not closed"),
        ("k=[]", "give at least one value"),
        ("k=[1, 1]", "write it in a list: [[1, 1]]"),
        ("k=[1, 2", "this is not YAML"),
        ("k=0.1", "needs a setting with several values"),
    ],
)
def test_what_an_axis_cannot_mean_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        axis(text)
    assert sentence in str(refused.value)


def test_a_key_stands_once() -> None:
    with pytest.raises(UsageError, match="a is set twice"):
        read_axes(["a=[1, 2]", "a=3"])
