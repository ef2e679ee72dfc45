"""The verdict: how far two sides are apart, and what is allowed."""

import numpy as np
import pytest

from paddle_dp.proof.compare import TOLERANCE, Side, compare, relative
from paddle_dp.proof.trace import short
from paddle_dp.proof.verify import sentences


def side(ranks=1, losses=(2.0, 1.5), norms=(1.0, 0.5), weight=1.0, **more):
    rows = [
        {"loss": loss, "gradient_norm": norm, "samples": 4, "shares": [4]}
        for loss, norm in zip(losses, norms, strict=True)
    ]
    weights = {"a": np.full(100, weight, "float32"), "b": np.ones(100, "float32")}
    return Side(ranks=ranks, rows=rows, weights=weights, **more)


def test_equal_sides_are_the_same():
    verdict = compare(side(), side(2), "float32")
    assert verdict.same
    assert (verdict.loss, verdict.gradient_norm, verdict.weights) == (0, 0, 0)


@pytest.mark.parametrize("other", [{"losses": (2.0, 1.50004)}, {"norms": (1.001, 0.5)}, {"weight": 1.001}])
def test_each_of_the_three_can_fail(other):
    assert not compare(side(), side(2, **other), "float32").same


def test_what_float32_refuses_bfloat16_allows():
    other = side(2, losses=(2.001, 1.5))
    assert not compare(side(), other, "float32").same
    assert compare(side(), other, "bfloat16").same


def test_the_worst_parameter_is_named():
    assert compare(side(), side(2, weight=1.1), "float32").worst == "a"


def test_a_loss_that_is_no_number_is_infinitely_wrong():
    assert relative(float("nan"), 1.0) == float("inf")
    assert not compare(side(losses=(float("nan"), 1.5)), side(2, losses=(float("nan"), 1.5)), "float32").same


def test_float32_allows_what_the_readme_says():
    assert TOLERANCE["float32"][0] == 1e-5


@pytest.mark.parametrize(("batch", "ranks"), [(50, 2), (50, 3), (64, 4), (8, 8), (2, 3)])
def test_the_short_batch_cannot_be_shared_equally(batch, ranks):
    size = short(batch, ranks)
    assert 0 < size < batch
    assert size % ranks


def test_what_differs_by_nature_is_said():
    one, many = side(), side(2, random=("act (RReLU) draws",), weight=2.0, local_norms=("norm1",))
    said = " ".join(sentences(one, many, compare(one, many, "float32")))
    assert "act (RReLU) draws." in said
    assert "sync_batch_norm=true" in said
    assert "do not learn" in said
