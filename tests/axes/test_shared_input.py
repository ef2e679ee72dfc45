"""Cut layers that read the same tensor exchange it once, and never what a tensor was before."""

from __future__ import annotations

import paddle
import pytest

from paddle_dp.core.precision import SingleForward, shared


class Exchange:
    """Doubles, and counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2


@pytest.fixture
def exchange():
    return Exchange()


def made_of_a_leaf():
    leaf = paddle.ones([2])
    leaf.stop_gradient = False
    return leaf, leaf * 3


def test_all_layers_take_what_the_first_one_exchanged(exchange):
    leaf, x = made_of_a_leaf()
    (shared(x, exchange, "a") + shared(x, exchange, "a") ** 2).sum().backward()
    assert exchange.calls == 1
    assert leaf.grad.tolist() == [6 + 2 * 36] * 2


def test_other_exchanges_and_other_groups_are_their_own(exchange):
    _, x = made_of_a_leaf()
    shared(x, exchange, ("copied", 0, 1))
    shared(x, exchange, ("copied", 2, 3))
    assert exchange.calls == 2


def test_a_tensor_that_changed_is_exchanged_again(exchange):
    x = paddle.ones([2])
    assert shared(x, exchange, "a").tolist() == [2, 2]
    x.add_(paddle.ones([2]))
    assert shared(x, exchange, "a").tolist() == [4, 4]


def test_a_forward_without_gradients_leaves_nothing_to_one_with(exchange):
    leaf, x = made_of_a_leaf()
    with paddle.no_grad():
        shared(x, exchange, "a")
    shared(x, exchange, "a").sum().backward()
    assert leaf.grad.tolist() == [6, 6]


def test_a_leaf_that_learns_may_be_used_after_its_backward(exchange):
    leaf, _ = made_of_a_leaf()
    for _ in range(2):
        shared(leaf, exchange, "a").sum().backward()
    assert leaf.grad.tolist() == [4, 4] and exchange.calls == 2


def test_a_buffer_that_set_value_writes_is_read_anew(exchange) -> None:
    buffer = paddle.ones([2])
    for written, read in ((1.0, 2.0), (5.0, 10.0)):
        buffer.set_value(paddle.full([2], written))
        with paddle.no_grad(), SingleForward():
            assert shared(buffer, exchange, "a").tolist() == [read] * 2
    buffer.set_value(paddle.zeros([2]))
    assert shared(buffer, exchange, "a").tolist() == [0, 0]


def test_a_state_that_a_forward_writes_between_two_layers_is_read_anew(exchange) -> None:
    state = paddle.ones([2])
    with SingleForward():
        for read in (2.0, 4.0, 8.0):
            output = shared(state, exchange, "a")
            assert output.tolist() == [read] * 2
            state.set_value(output)


def test_layers_of_a_forward_without_gradients_take_what_the_first_one_exchanged(exchange) -> None:
    _, learned = made_of_a_leaf()
    with paddle.no_grad(), SingleForward():
        x = learned + 1
        for _ in range(3):
            with SingleForward():  # as a copy of the model does
                shared(x, exchange, "a")
    assert exchange.calls == 1
