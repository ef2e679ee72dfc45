"""What is llama's own: rotary positions, grouped heads, its norm, its mistakes."""

import math

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


def test_neighbours_turn_as_complex_numbers():
    x, at = np.random.default_rng(0).normal(size=(2, 5, 3, 8)), 3
    turned = rotate(paddle.to_tensor(x), Rope(base=100.0, interleaved=True), at).numpy()
    angles = np.arange(at, at + 5)[:, None] * 100.0 ** (-np.arange(4) / 4)
    wanted = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., ::2] + 1j * turned[..., 1::2], wanted, atol=1e-12)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the same turn, of elements half a head apart
    halves = rotate(paddle.to_tensor(x[..., order]), Rope(base=100.0), at).numpy()
    np.testing.assert_allclose(turned[..., order], halves, atol=1e-12)


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


def test_attention_alone_has_biases_if_asked():
    def biased(bias):
        named = Config(**SMALL, bias=bias).build().blocks[1].named_parameters()
        return [name for name, p in named if p.ndim == 1 and "norm" not in name]

    assert biased(None) == []
    assert sorted(biased("qkv")) == ["k.bias", "q.bias", "v.bias"]
    assert sorted(biased("qkvo")) == ["k.bias", "out.bias", "q.bias", "v.bias"]


def test_scores_of_normed_heads_do_not_depend_on_the_length_of_q_and_k(tokens):
    paddle.seed(0)
    model = Config(**SMALL, qk_norm=True, head_width=6).build()
    text, block = tokens(9), model.blocks[1]
    assert block.q.weight.shape == [16, 24] and block.out.weight.shape == [24, 16]
    for layer, factor in ((block.q, 100.0), (block.k, 30.0)):
        layer.weight.set_value(layer.weight * factor)  # far above epsilon
    before = model(text)
    for layer, factor in ((block.q, 9.0), (block.k, 2.0)):
        layer.weight.set_value(layer.weight * factor)
    assert float((model(text) - before).abs().max()) < 1e-5
    block.k_norm.weight.set_value(block.k_norm.weight * 3)
    assert float((model(text) - before).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"head_width": 0}, "head_width: 0 is less than 1"),
        ({"head_width": 5}, "heads: 4 are 5 wide, .* even width: choose another head_width"),
        ({"width": 18}, "heads: 4 does not divide width 18"),
        ({"width": 12}, "heads: 4 of width 12 are 3 wide, .* choose another heads or width"),
    ],
)
def test_a_width_of_heads_that_cannot_be_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        Config(**SMALL | settings)
    Config(**SMALL | {"width": 18}, head_width=4)  # which heads need not divide


def test_positions_are_slowed_as_published() -> None:
    """Of Llama 3.1, by its published rule: wavelength by wavelength, in three ranges."""
    rope = Rope(base=5e5, scaling="llama3", factor=8.0, low=1.0, high=4.0, original_length=8192)
    plain = Rope(base=5e5).frequencies(64, "float64").numpy()
    wanted = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            wanted.append(frequency)
        elif wavelength > 8192 / 1:
            wanted.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - smooth) * frequency / 8 + smooth * frequency)
    found = rope.frequencies(64, "float64").numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert len({round(f / p, 9) for f, p in zip(found, plain, strict=True)}) > 4, "all three ranges"
    halved = Rope(scaling="linear", factor=2.0).frequencies(8, "float64") * 2
    np.testing.assert_allclose(halved.numpy(), Rope().frequencies(8, "float64").numpy())


def test_tied_scores_use_the_embedding_itself() -> None:
    tied = Config(depth=1, tied=True).build()
    assert tied.blocks[-1].out.weight is tied.blocks[0].token.weight
    assert len(tied.parameters()) == len(Config(depth=1).build().parameters()) - 1


def test_positions_are_where_a_token_is_turned_to():
    x = paddle.randn([1, 3, 2, 8])
    turned = rotate(x, Rope(), positions=paddle.to_tensor([[4, 5, 0]]))
    assert (turned[:, :2] == rotate(x[:, :2], Rope(), 4)).all() and (turned[:, 2] == x[:, 2]).all()
