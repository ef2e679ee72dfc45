"""The clip by a norm: the same on a number and on a tensor that stays on its device."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddle_dp.core import gradients


def with_gradient(numbers: list[float]) -> paddle.Tensor:
    weight = paddle.create_parameter([len(numbers)], "float32")
    weight._copy_gradient_from(paddle.to_tensor(numbers))
    return weight


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("bound", "factor"), [(10.0, 1.0), (5.0, 1.0), (2.5, 0.5)])
def test_a_clip_acts_above_its_bound_only(on_device: bool, bound: float, factor: float) -> None:
    weight = with_gradient([3.0, -4.0])
    norm = gradients.global_norm([weight])
    gradients.clip([weight], norm.astype("float64") if on_device else float(norm), bound)
    assert np.array_equal(weight.grad.numpy(), np.array([3.0, -4.0], "float32") * factor)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_norm_that_is_no_number_is_not_hidden(on_device: bool) -> None:
    weight = with_gradient([3.0, -4.0])
    norm = paddle.full([], math.nan, "float64") if on_device else math.nan
    gradients.clip([weight], norm, 1.0)
    assert np.isnan(weight.grad.numpy()).all()
