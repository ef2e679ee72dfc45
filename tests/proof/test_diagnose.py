"""From numbers to the likely mistake."""

import math

import numpy as np
import pytest

from paddle_dp.proof import diagnose

DEGREES = {"data": 1, "pipeline": 1, "sharding": 1, "sequence": 1, "tensor": 2}
PLACES = [{"data": 0, "pipeline": 0, "sharding": 0, "sequence": 0, "tensor": rank} for rank in range(2)]
G = np.linspace(-1, 2, 12).reshape(3, 4)


def test_each_sample_once_is_nothing_to_say():
    assert diagnose.samples([3, 1, 2], [(0, [1]), (1, [3, 2])]) is None


def test_a_sample_that_is_read_twice_and_one_that_never_is():
    assert diagnose.samples([17, 42, 5], [(0, [17, 17]), (1, [5])]) == "sample 17 was read twice, 42 never"


def test_samples_that_are_left_out_and_samples_of_another_step():
    assert diagnose.samples([1, 2, 3], [(0, [1])]) == "samples 2, 3 were never read"
    assert "which one process does not read" in diagnose.samples([1, 2], [(0, [1]), (1, [9])])


def test_ranks_of_one_model_must_read_the_same():
    assert diagnose.samples([1, 2], [(0, [1, 2]), (0, [1, 2])]) is None
    assert "different samples" in diagnose.samples([1, 2], [(0, [1, 2]), (0, [2, 1])])


def test_what_a_factor_leaves_over():
    c, rest = diagnose.factor(G, 0.5 * G)
    assert (c, rest) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12))
    assert diagnose.factor(G, np.zeros_like(G)) == (0, 0)
    assert math.isnan(diagnose.factor(np.zeros_like(G), G)[0])


@pytest.mark.parametrize(
    ("c", "says"),
    [
        (0.5, "is 0.5 × one process's: a sum over the tensor axis is missing"),
        (2.0, "is 2 × one process's: summed twice over the tensor axis"),
        (0.0, "is 0: nothing reaches it"),
        (-1.0, "sign is turned"),
        (1.7, "is 1.7 × one process's"),
        (1.0001, "is off by 0.01 % of one process's"),
    ],
)
def test_a_factor_says_which_axis(c, says):
    assert diagnose.scaled(*diagnose.factor(G, c * G), DEGREES, cut=False).startswith(
        says
    ) or says in diagnose.scaled(*diagnose.factor(G, c * G), DEGREES, cut=False)


def test_slices_are_not_summed_over_the_tensor_axis():
    both = DEGREES | {"data": 2}
    assert "the data axis" in diagnose.scaled(0.5, 0.0, both, cut=True)
    assert "the data or the tensor axis" in diagnose.scaled(0.5, 0.0, both, cut=False)


def test_half_of_something_else_is_said_with_care():
    assert "perhaps a sum over the tensor axis is missing" in diagnose.scaled(0.52, 0.4, DEGREES, cut=False)


def test_ranks_that_hold_parts_of_a_sum_lack_that_sum():
    part = np.where(G > 0.5, G, 0.0)
    said = diagnose.unequal_copies(G, {0: part, 1: G - part}, PLACES, DEGREES)
    assert said.startswith("on the tensor axis is ")
    assert "a sum over the axis is missing (what ranks 0, 1 hold adds up to one process's)" in said


def test_one_rank_that_is_right_and_one_that_is_not():
    said = diagnose.unequal_copies(G, {0: G, 1: 1.5 * G}, PLACES, DEGREES)
    assert said == "is one process's on rank 0; on rank 1 it is 1.5 × one process's"


def test_a_softmax_over_half_of_the_classes():
    said = diagnose.loss(4.0, 4.0 - math.log(2), DEGREES)
    assert said.startswith("loss is ln 2 too low")
    assert "softmax over half of the classes" in said
    assert "ln" not in diagnose.loss(4.0, 4.01, DEGREES)


def test_a_loss_that_is_summed_twice():
    assert "summed twice over the tensor axis" in diagnose.loss(1.0, 2.0, DEGREES)


def test_an_update_that_differs_with_equal_gradients():
    assert "another learning rate" in diagnose.update(1.5, 0.0)
    assert "does not know this parameter" in diagnose.update(0.0, 0.0)
    assert "frozen there?" in diagnose.update(math.nan, 1.0)


def remembered(*values):
    return {"2": {f"`mean` of body.{n}": value for n, value in enumerate(values) if value is not None}}


@pytest.mark.parametrize(
    ("one", "many", "groups", "says"),
    [
        ((0.3,), [(0.3,), (0.3 * (1 + 1e-12),)], (0, 0), None),
        (
            (0.3,),
            [(0.31,), (0.29,)],
            (0, 0),
            "`mean` of body.0 is 0.31 on rank 0 and 0.29 on rank 1 after step 2",
        ),
        (
            (0.3,),
            [(0.31,), (0.31,)],
            (0, 0),
            "`mean` of body.0 is 0.31 on rank 0 and 0.3 on one process after step 2",
        ),
        (
            (None,),
            [(1,), (1,)],
            (0, 0),
            "`mean` of body.0 changes on rank 0 and not on one process after step 2",
        ),
        (
            (None,),
            [(1,), (None,)],
            (0, 0),
            "`mean` of body.0 changes on rank 0 and not on rank 1 after step 2",
        ),
        (
            (1,),
            [(None,), (None,)],
            (0, 0),
            "`mean` of body.0 changes on one process and not on rank 0 after step 2",
        ),
        ((1, 2), [(1, None), (None, 2)], (0, 1), None),  # stages of a pipeline
        (("f, CRC-32 1",), [("f, CRC-32 2",), ("f, CRC-32 2",)], (0, 0), None),  # made of weights, rounded
        (("f, CRC-32 1",), [("f, CRC-32 2",), ("f, CRC-32 3",)], (0, 0), "differs between rank 0 and rank 1"),
        (([2.0, 1e-17],), [([2.0, 0.0],), ([2.0, -1e-17],)], (0, 0), None),
        (([2.0, 0.1],), [([2.0, 0.1],), ([2.0, 0.2],)], (0, 0), "differs between rank 0 and rank 1"),
        ((1, 2), [(1, 3), (2, 3)], (0, 0), "is 1 on rank 0 and 2 on rank 1 after step 2 (1 more do, too)"),
    ],
)
def test_what_changes_otherwise_beside_the_weights_is_named(one, many, groups, says):
    said = diagnose.layer_state(remembered(*one), [remembered(*rank) for rank in many], groups, 1e-7)
    assert (said is None) if says is None else says in said
