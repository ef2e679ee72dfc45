"""The sum of gradients by pushes, without processes: what arrives late, in another order, or in 16 bits."""

from __future__ import annotations

from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread

import numpy as np
import paddle
import pytest

from paddle_dp.exchange.buckets import MIN_BUCKETS, SMALLEST, fill
from paddle_dp.exchange.pushed_gradients import KINDS, MAX_SEGMENT, MIN_SHARE, SUM, PushReduce, cut
from paddle_dp.tensors import bytes_from, bytes_of, moved_gradient, numbers_of
from tests.exchange.hard import learn
from tests.ranks import run_ranks


class Wire:
    """The pushes of one of two ranks, which keeps what the other takes."""

    def __init__(self, rank, sent, arriving):
        self.ranks = [0, 1]
        self.rank = rank
        self.peers = [1 - rank]
        self._sent = sent
        self._arriving = arriving

    def send_bytes(self, to, number, data):
        self._sent.put((number, memoryview(bytearray(data.tobytes()))))

    def end(self, to):
        self._sent.put(None)

    def arrived(self, source):
        return not self._arriving.empty()

    def receive(self, source):
        return self._arriving.get(timeout=5)

    def waiting(self, activity):
        return nullcontext()


def wires_of_two():
    """The pushes of two ranks, to each other."""
    queues = SimpleQueue(), SimpleQueue()
    return [Wire(rank, queues[rank], queues[1 - rank]) for rank in (0, 1)]


def two():
    """Two ranks, each with a parameter that both keep, of which rank 0 is the one that adds up."""
    made = []
    for wire in wires_of_two():
        parameter = paddle.create_parameter([3], "float32")
        made.append((parameter, PushReduce(wire, [parameter], [[0, 1]])))
    return made


class Queued(Wire):
    """Keeps the bytes of sums as they are, like a socket that has not sent them yet, beside a copy of then."""

    def __init__(self, rank, sent, arriving):
        super().__init__(rank, sent, arriving)
        self.sums = []

    def send_bytes(self, to, number, data):
        if number % KINDS == SUM:
            self.sums.append((data, data.copy()))
        super().send_bytes(to, number, data)


@pytest.mark.parametrize("size", [3, 4 * MIN_SHARE])  # one rank adds up, or each its share
def test_a_sum_in_transit_does_not_change_with_the_gradient(size):
    """The update scales the gradient in place while bytes of the sum may wait for the socket."""
    queues = SimpleQueue(), SimpleQueue()
    wires = [Queued(rank, queues[rank], queues[1 - rank]) for rank in (0, 1)]
    made = []
    for wire in wires:
        parameter = paddle.create_parameter([size], "float32")
        parameter._copy_gradient_from(paddle.full([size], 1.0 + wire.rank))
        made.append((parameter, PushReduce(wire, [parameter], [[0, 1]])))
    other = Thread(target=made[1][1].finish)
    other.start()
    made[0][1].finish()
    other.join()
    for parameter, _ in made:
        assert (parameter.grad.numpy() == 3).all()
        parameter.grad.scale_(0.5)
    sums = [pair for wire in wires for pair in wire.sums]
    assert sums and all((queued == sent).all() for queued, sent in sums)


def give(parameter, values):
    parameter._copy_gradient_from(paddle.to_tensor(values))


def finished(first, second):
    """The gradients of both after `finish`, in which they wait for each other."""
    other = Thread(target=second[1].finish)
    other.start()
    first[1].finish()
    other.join()
    return [parameter.grad.numpy().tolist() for parameter, _ in (first, second)]


def test_what_comes_after_the_last_part_is_added_to_the_sum_that_has_left():
    first, second = two()
    give(first[0], [1.0, 2.0, 3.0])
    first[1].send(0, final=True)
    give(second[0], [10.0, 20.0, 30.0])
    second[1].send(0, final=True)
    first[1].take()
    assert first[1]._sums  # made while backward runs
    give(second[0], [100.0, 0.0, 0.0])
    assert finished(first, second) == [[111.0, 22.0, 33.0]] * 2


def test_parts_that_are_not_final_wait_for_the_end():
    first, second = two()
    give(first[0], [1.0, 2.0, 3.0])
    first[1].send(0, final=True)
    for value in (1.0, 2.0):
        give(second[0], [value] * 3)
        second[1].send(0)
    first[1].take()
    assert not first[1]._sums
    assert finished(first, second) == [[4.0, 5.0, 6.0]] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_added_in_32_and_rounded_to_nearest_even(dtype):
    values = paddle.to_tensor([1.0, 1 / 3, -2.7, 65504.0, 1e-3, 0.0])
    narrow = values.astype(dtype)
    bits = narrow.view("uint8").numpy()
    numbers = numbers_of(bits, dtype)
    np.testing.assert_array_equal(numbers, narrow.astype("float32").numpy())
    np.testing.assert_array_equal(bytes_from(values.numpy(), dtype), bits)


def test_a_number_that_is_none_stays_none_in_bfloat16():
    assert np.isnan(numbers_of(bytes_from(np.array([np.nan], np.float32), "bfloat16"), "bfloat16")).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_moved_gradient_keeps_its_numbers_also_of_a_parameter_that_is_used_transposed(transposed):
    parameter = paddle.create_parameter([2, 3], "float32")
    used = parameter.t() if transposed else parameter
    (used * paddle.arange(6, dtype="float32").reshape(used.shape)).sum().backward()
    assert parameter.grad.is_contiguous() is not transposed
    wanted = parameter.grad.numpy()
    moved = moved_gradient(parameter)
    assert parameter.grad is None
    assert bytes_of(moved).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("each_micro_batch", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_owners_have_the_sum_in_the_order_of_ranks_bit_by_bit(ranks, each_micro_batch):
    for found in run_ranks(learn, ranks, True, each_micro_batch):
        assert not any(found)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_all_have_the_sum_in_the_order_of_ranks_bit_by_bit(ranks):
    for found in run_ranks(learn, ranks, False):
        assert not any(found)


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
