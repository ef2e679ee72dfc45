"""Blocks are dealt in runs, none is lost, and the largest stage is as small as it can be."""

import itertools
import random

import pytest

from paddle_dp.plan.partition import check_partition, stage_bounds


def test_equal_numbers_leave_the_rest_to_the_last_stages():
    assert stage_bounds([1] * 6, 4) == [0, 1, 2, 4, 6]
    assert stage_bounds([9, 1, 1, 1], 2) == [0, 2, 4]


def test_given_counts():
    assert stage_bounds([1] * 6, 3, (1, 3, 2)) == [0, 1, 4, 6]


def test_the_largest_stage_is_as_small_as_it_can_be():
    draw = random.Random(0)
    for _ in range(50):
        weights = [draw.randrange(1, 100) for _ in range(draw.randrange(4, 9))]
        stages = draw.randrange(1, 5)
        bounds = stage_bounds(weights, stages, "parameters")
        assert bounds[0] == 0 and bounds[-1] == len(weights)
        assert len(bounds) == stages + 1 and all(a < b for a, b in itertools.pairwise(bounds))
        others = itertools.combinations(range(1, len(weights)), stages - 1)
        assert _largest(weights, bounds) == min(_largest(weights, [0, *o, len(weights)]) for o in others)


def _largest(weights, bounds):
    return max(sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds))


def test_equally_large_stages_are_also_equal_otherwise():
    assert stage_bounds([100, 1, 1, 1, 1], 3, "parameters") == [0, 1, 3, 5]


@pytest.mark.parametrize(
    ("partition", "blocks", "stages", "said"),
    [
        ("uniform", 3, 4, "4 pipeline stages need as many blocks, and the model has 3"),
        ((3, 3), 6, 4, "partition names 2 stages, and there are 4"),
        ((3, 2), 6, 2, "partition deals 5 blocks, and the model has 6"),
    ],
)
def test_what_cannot_be_dealt_is_said(partition, blocks, stages, said):
    assert check_partition(partition, blocks, stages) == [said]


def test_what_can_be_dealt_is_not_refused():
    assert not check_partition((4, 2), 6, 2)
    assert not check_partition("parameters", 6, 6)
