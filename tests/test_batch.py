"""Inputs of more than one tensor, without a tensor."""

import pytest

from paddle_dp.batch import call, leaves, mapped, named_leaves, structure_of, unflatten
from paddle_dp.errors import UsageError

NESTED = {"text": {"mask": 2, "ids": 1}, "pair": (3, [4])}


def test_leaves_come_in_the_order_of_keys_and_have_names():
    assert list(named_leaves(NESTED)) == [
        ("pair[0]", 3),
        ("pair[1][0]", 4),
        ("text.ids", 1),
        ("text.mask", 2),
    ]
    assert list(named_leaves(5)) == [("", 5)]


def test_unflatten_undoes_leaves_and_lists_become_tuples():
    again = unflatten(structure_of(NESTED), leaves(NESTED))
    assert again == {"pair": (3, (4,)), "text": {"ids": 1, "mask": 2}}
    assert structure_of(again) == structure_of(NESTED)


def test_structures_differ_by_keys_and_lengths_not_by_the_order_of_keys():
    assert structure_of({"a": 1, "b": 2}) == structure_of({"b": 5, "a": 6})
    assert structure_of({"a": 1}) != structure_of({"b": 1})
    assert structure_of((1, 2)) != structure_of((1,))


def test_mapped_takes_several_of_one_structure():
    assert mapped(lambda a, b: a + b, {"x": 1, "y": (2,)}, {"y": (20,), "x": 10}) == {"x": 11, "y": (22,)}
    with pytest.raises(ValueError, match="shorter"):
        mapped(lambda a, b: a, (1, 2), (1,))


def one(x):
    return "one", x


def two(a, b):
    return "two", a, b


def two_or_one(a, b=None):
    return "two or one", a, b


def option(batch, training=False):
    return "option", batch, training


def anything(*args, **named):
    return "anything", args, named


@pytest.mark.parametrize(
    ("function", "inputs", "answer"),
    [
        (one, 5, ("one", 5)),
        (one, (1, 2), ("one", (1, 2))),
        (one, {"a": 1, "b": 2}, ("one", {"a": 1, "b": 2})),
        (one, {"x": 1}, ("one", 1)),
        (two, (1, 2), ("two", 1, 2)),
        (two, {"b": 2, "a": 1}, ("two", 1, 2)),
        (two_or_one, (1, 2), ("two or one", 1, 2)),
        (two_or_one, {"a": 1}, ("two or one", 1, None)),
        (option, {"ids": 1, "mask": 2}, ("option", {"ids": 1, "mask": 2}, False)),
        (anything, (1, 2), ("anything", (1, 2), {})),
        (anything, {"a": 1}, ("anything", (), {"a": 1})),
    ],
)
def test_a_function_is_called_as_its_parameters_say(function, inputs, answer):
    assert call(function, inputs) == answer


@pytest.mark.parametrize("inputs", [{"a": 1, "c": 2}, {"a": 1}, (1, 2, 3)])
def test_inputs_that_fit_no_parameters_are_named(inputs):
    with pytest.raises(UsageError, match="forward takes a, b, and the data set's inputs are"):
        call(two, inputs)


def test_a_key_that_is_no_parameter_is_named_with_the_one_that_is_missing():
    with pytest.raises(UsageError, match="inputs are a, c: there is no 'b', 'c' is no parameter"):
        call(two, {"a": 1, "c": 2})
