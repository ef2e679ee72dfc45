"""The orders of the schedules, played out: idle time is what the formula says, and nothing waits for ever. Blocks are
dealt in runs, none is lost, and the largest stage is as small as it can be."""

import itertools
import random
import re
from typing import get_args

import pytest

from paddle_dp.axes.pipeline.schedules import ENGINES
from paddle_dp.plan.pipeline_schedule import (
    Schedule,
    Work,
    bubble,
    check_partition,
    check_schedule,
    idle,
    orders,
    stage_bounds,
    timeline,
)

KINDS = [("f_then_b", 1), ("1f1b", 1), ("f_then_b", 2), ("interleaved", 2), ("interleaved", 3)]


@pytest.mark.parametrize(("schedule", "each"), KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 16), (3, 6), (4, 4), (4, 12)])
def test_equal_stages_are_idle_as_long_as_the_formula_says(schedule, each, stages, micro_batches):
    spans = timeline(orders(schedule, stages, micro_batches, each))
    assert idle(spans, stages) == pytest.approx([bubble(stages, micro_batches, each)] * stages)
    everything = {(s.stage, s.work) for s in spans}
    assert len(everything) == len(spans) == 2 * stages * each * micro_batches


def test_each_schedule_has_an_order_and_an_engine_and_no_other_word_has_one():
    assert {(schedule, each > 1) for schedule, each in KINDS} == {*ENGINES}
    assert {schedule for schedule, _ in ENGINES} == {*get_args(Schedule)}
    with pytest.raises(ValueError, match="the order of the schedule 'zero_bubble' is not known"):
        orders("zero_bubble", 2, 4)


def test_the_formula():
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert bubble(4, 8, 2) == pytest.approx(3 / 19)
    assert bubble(1, 8) == 0


def test_one_micro_is_plain_placement_of_layers():
    assert idle(timeline(orders("1f1b", 4, 1)), 4) == pytest.approx([0.75] * 4)


def test_fewer_micros_than_stages_run_too():
    spans = timeline(orders("1f1b", 4, 2))
    assert idle(spans, 4) == pytest.approx([3 / 5] * 4)


def test_1f1b_keeps_fewer_micros_in_memory_than_f_then_b():
    """The most forwards whose backward has not come yet, on the first stage."""

    def kept(schedule):
        balance, most = 0, 0
        for work in orders(schedule, 4, 16)[0]:
            balance += 1 if work.kind == "forward" else -1
            most = max(most, balance)
        return most

    assert (kept("f_then_b"), kept("1f1b")) == (16, 4)


def test_a_slow_stage_makes_the_others_wait():
    spans = timeline(orders("1f1b", 2, 8), lambda stage, work: 2.0 if stage else 1.0)
    first, second = idle(spans, 2)
    assert first > 0.5 > bubble(2, 8) > second


def test_stages_that_wait_for_each_other_are_said():
    forward, backward = Work("forward", 0), Work("backward", 0)
    with pytest.raises(ValueError, match="wait for each other"):
        timeline([[backward, forward], [forward, backward]])


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "each", "said"),
    [
        ("1f1b", 4, 2, "one stage on each rank"),
        ("interleaved", 4, 1, "virtual_stages of 2 or more"),
        ("interleaved", 5, 2, r"micro_batches \(5\) to be a multiple of pipeline 2"),
        ("f_then_b", 3, 2, r"micro_batches \(3\) to be a multiple of pipeline 2"),
    ],
)
def test_what_cannot_run_is_said(schedule, micro_batches, each, said):
    (sentence,) = check_schedule(schedule, 2, micro_batches, each)
    assert re.search(said, sentence)


def test_what_can_run_is_not_refused():
    assert not check_schedule("1f1b", 4, 1)
    assert not check_schedule("f_then_b", 4, 3)
    assert not check_schedule("interleaved", 4, 4, 3)


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
