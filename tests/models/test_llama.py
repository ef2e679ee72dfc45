"""What is llama's own: rotary positions, grouped heads, its norm, its mistakes."""

import numpy as np
import paddle
import pytest

from models.llama import Config, RMSNorm, Rope, rotate

SMALL = {"vocab": 20, "width": 16, "depth": 2, "heads": 4, "hidden": 24, "length": 12}


def test_turning_keeps_lengths_and_says_only_how_far_apart():
    paddle.seed(0)
    q, k = paddle.randn([1, 1, 1, 8]), paddle.randn([1, 1, 1, 8])

    def product(at, other):
        return float((rotate(q, Rope(), at) * rotate(k, Rope(), other)).sum())

    assert product(7, 5) == pytest.approx(product(12, 10), abs=1e-5)
    assert product(7, 5) != pytest.approx(product(7, 4), abs=1e-3)
    assert product(0, 0) == pytest.approx(float((q * k).sum()), abs=1e-6)
    assert float(rotate(q, Rope(), 9).norm()) == pytest.approx(float(q.norm()), abs=1e-5)
    many = paddle.randn([2, 6, 3, 8])
    assert (
        float((rotate(many, Rope(base=100.0))[:, 4:] - rotate(many[:, 4:], Rope(base=100.0), 4)).abs().max())
        < 1e-6
    )


def test_the_first_pair_turns_by_one_a_token():
    x = paddle.zeros([1, 3, 1, 4])
    x[:, :, :, 0] = 1.0
    turned = rotate(x, Rope())[0, :, 0].numpy()
    assert np.allclose(turned[:, 0], np.cos(range(3)), atol=1e-6)
    assert np.allclose(turned[:, 2], np.sin(range(3)), atol=1e-6)
    assert (turned[:, [1, 3]] == 0).all()


def test_grouped_heads_are_heads_with_repeated_keys(tokens):
    paddle.seed(0)
    grouped, full = Config(**SMALL, kv_heads=2).build(), Config(**SMALL, kv_heads=4).build()
    for name, weight in full.state_dict().items():
        small = grouped.state_dict()[name]
        if name.endswith(("k.weight", "v.weight")):
            small = small.reshape([16, 2, 1, 4]).tile([1, 1, 2, 1]).reshape([16, 16])
        weight.set_value(small)
    assert float((grouped(tokens(9)) - full(tokens(9))).abs().max()) < 1e-6


def test_a_norm_is_a_scale_in_float32():
    x = paddle.randn([3, 64]) * 50
    assert np.allclose((RMSNorm(64)(x) ** 2).mean(-1).numpy(), 1, atol=1e-4)
    assert float((RMSNorm(64)(x * 10) - RMSNorm(64)(x)).abs().max()) < 1e-4
    large = paddle.full([1, 64], 300.0).astype("float16")  # 300² is more than float16 holds
    assert np.allclose(RMSNorm(64)(large).numpy(), 1, atol=1e-2)


def test_no_layer_has_a_bias():
    assert all(p.ndim == 2 or "norm" in name for name, p in Config(**SMALL).build().named_parameters())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"heads": 3, "width": 128}, "heads: 3 does not divide width 128"),
        ({"kv_heads": 3}, "kv_heads: 3 does not divide heads 4"),
        ({"width": 12, "heads": 4}, "heads: 4 of width 12 are 3 wide"),
        ({"hidden": 0}, "hidden: 0 is less than 1"),
    ],
)
def test_a_mistake_is_met_at_the_door(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**wrong)
