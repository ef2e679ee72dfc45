"""Gradients cut into pieces for CPUs, and filled into buckets for accelerators: each number once, equal shares."""

import pytest

from paddle_dp.exchange.buckets import MIN_BUCKETS, SMALLEST, fill
from paddle_dp.exchange.pushed_gradients import MAX_SEGMENT, MIN_SHARE, cut


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_number_is_added_once_by_one_of_its_keepers(ranks):
    sizes = [1, 7, MIN_SHARE * ranks, 3 * MAX_SEGMENT * ranks + 1, 5, 0]
    everyone = list(range(ranks))
    pieces = cut(sizes, [everyone] * len(sizes))
    for place, size in enumerate(sizes):
        ranges = sorted((one.start, one.stop) for one in pieces if one.param_index == place)
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == size
    added = [sum(one.stop - one.start for one in pieces if one.owner == rank) for rank in everyone]
    assert max(added) - min(added) <= 16
    assert all(one.stop - one.start <= MAX_SEGMENT for one in pieces)


def test_what_is_too_small_for_all_is_shared_by_those_with_the_fewest():
    pieces = cut([2 * MIN_SHARE, 2 * MIN_SHARE + 1, 10], [[0, 1, 2, 3]] * 3)
    assert [(one.param_index, one.owner) for one in pieces] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 0)]


def test_a_parameter_with_one_keeper_goes_to_it():
    assert {(one.param_index, one.owner) for one in cut([9, MAX_SEGMENT * 2], [[1], [0]])} == {(0, 1), (1, 0)}


def test_buckets_are_in_the_order_of_backward_of_one_kind_and_closed_when_full():
    number = SMALLEST // 4
    sizes = [number, 10, number, 10, number, 10]
    buckets = fill(sizes, [0, 0, 1, 1, 0, 0], 4)
    assert [one.indices for one in buckets] == [(5, 4), (3, 2), (1, 0)]
    assert [one.kind for one in buckets] == [0, 1, 0]
    assert [one.starts for one in buckets] == [(0, 10)] * 3
    assert [one.size for one in buckets] == [number + 10] * 3


def test_a_bucket_that_never_fills_leaves_when_its_last_gradient_is_there():
    assert [one.indices for one in fill([5, 5, 5], ["b", "a", "a"], 4)] == [(2, 1), (0,)]


def test_a_bucket_is_a_small_part_of_all_gradients():
    sizes = [SMALLEST // 16] * 4 * MIN_BUCKETS * 2
    assert {4 * one.size for one in fill(sizes, [0] * len(sizes), 4)} == {2 * SMALLEST}
