"""One recipe word, the same meaning on a CPU."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.core.precision import GROW_EVERY, HOPELESS, LossScale, MixedPrecision
from paddle_dp.recipe import Precision


def outputs(dtype):
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    mixed = MixedPrecision(Precision(dtype=dtype), model, "cpu")
    x = paddle.randn([16, 64])
    with mixed.context():
        y = model(x)
    y.square().sum().backward()
    return y.numpy(), model[0].weight.grad.numpy(), model


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_products_are_rounded_as_the_word_says(dtype, bits):
    exact, exact_grad, _ = outputs("float32")
    rounded, rounded_grad, model = outputs(dtype)
    error = np.abs(rounded - exact).max() / np.abs(exact).max()
    assert 2.0 ** -(bits + 3) < error < 2.0 ** -(bits - 3)
    assert np.array_equal(rounded, paddle.to_tensor(rounded).astype(dtype).astype("float32").numpy())
    assert not np.array_equal(rounded_grad, exact_grad)
    assert model[0].weight.dtype == paddle.float32
    assert "weight" not in model[0].__dict__


def test_outside_the_context_nothing_is_rounded():
    paddle.seed(0)
    plain = nn.Linear(8, 8)
    x = paddle.randn([2, 8])
    before = plain(x).numpy()
    MixedPrecision(Precision(dtype="bfloat16"), plain, "cpu")
    np.testing.assert_array_equal(plain(x).numpy(), before)


def test_the_scale_halves_on_overflow_and_doubles_after_many_good_steps():
    scale = LossScale(1024.0)
    assert not scale.update(False)
    assert (scale.scale, scale.skipped) == (512.0, 1)
    assert all(scale.update(True) for _ in range(GROW_EVERY))
    assert scale.scale == 1024.0
    restored = LossScale(1.0)
    restored.load(scale.state())
    assert restored.state() == scale.state()


def test_a_scale_that_cannot_fall_any_more_is_hopeless_after_a_while():
    scale = LossScale(65536.0)
    assert [scale.update(False) or scale.hopeless for _ in range(HOPELESS)] == [False] * (HOPELESS - 1) + [
        True
    ]
    assert not scale.update(False) and scale.hopeless
    assert scale.update(True) and not scale.hopeless


def test_the_scale_never_falls_below_one():
    scale = LossScale(2.0)
    for _ in range(5):
        scale.update(False)
    assert scale.scale == 1.0
