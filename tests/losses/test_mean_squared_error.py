"""Squared error against NumPy, for outputs of any shape."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.errors import LossError
from paddle_dp.losses.mean_squared_error import Config

random = np.random.default_rng(0)
loss = Config().build()


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 4)])
def test_the_total_is_over_samples(shape: tuple[int, ...]) -> None:
    outputs, targets = random.normal(size=(2, *shape)).astype("float32")
    total, count = loss(paddle.to_tensor(outputs), paddle.to_tensor(targets))
    assert total.item() == pytest.approx(((outputs - targets) ** 2).reshape(7, -1).mean(1).sum(), rel=1e-6)
    assert (count, total.shape) == (7, [])


def test_a_column_against_a_row_is_not_broadcast() -> None:
    outputs, targets = random.normal(size=(2, 7)).astype("float32")
    total, _ = loss(paddle.to_tensor(outputs[:, None]), paddle.to_tensor(targets))
    assert total.item() == pytest.approx(((outputs - targets) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("shape", [(6,), (7, 2), (1, 7)])
def test_other_numbers_than_the_outputs_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LossError, match="give targets the shape of the outputs"):
        loss(paddle.zeros([7]), paddle.zeros(list(shape)))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_autocast_does_not_reach_the_total(level: str) -> None:
    outputs, targets = map(paddle.to_tensor, random.normal(size=(2, 40, 5)).astype("float32"))
    with paddle.amp.auto_cast(True, level=level, dtype="bfloat16"):
        total, _ = loss(outputs, targets)
        low, _ = loss(outputs.astype("bfloat16"), targets)
    assert total.dtype == low.dtype == paddle.float32
    assert total.item() == loss(outputs, targets)[0].item()


def test_whole_numbers_are_targets_too() -> None:
    assert loss(paddle.zeros([2]), paddle.to_tensor([1, 3]))[0].item() == 10.0


def test_the_gradient_of_the_mean_is_the_one_of_a_mean() -> None:
    numbers, targets = random.normal(size=(2, 7, 3)).astype("float32")
    outputs = paddle.to_tensor(numbers, stop_gradient=False)
    total, count = loss(outputs, paddle.to_tensor(targets))
    (total / count).backward()
    np.testing.assert_allclose(outputs.grad.numpy(), 2 * (numbers - targets) / 21, rtol=1e-5, atol=1e-7)
