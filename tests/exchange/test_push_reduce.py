"""The sum of gradients by pushes, without processes: what arrives late, in another order, or in 16 bits."""

from __future__ import annotations

from contextlib import nullcontext
from queue import SimpleQueue
from threading import Thread

import numpy as np
import paddle
import pytest

from paddle_dp.exchange.pushed_gradients import PushReduce
from paddle_dp.tensors import bytes_from, bytes_of, moved_gradient, numbers_of


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
