"""On CPUs a convolution with a small output is one product: the same layer, and the same gradients to rounding."""

from __future__ import annotations

import copy
import pickle

import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.model.convolution_on_cpu import quick_convolutions

SHAPES = {
    "2×2": ([5, 64, 2, 2], {"kernel_size": 3, "padding": 1}),
    "stride": ([3, 64, 7, 5], {"kernel_size": 3, "stride": 2, "padding": 1}),
    "uneven": ([3, 64, 6, 4], {"kernel_size": [3, 1], "stride": [2, 1], "padding": [0, 2]}),
    "1×1": ([1, 64, 3, 3], {"kernel_size": 3}),
    "pointwise": ([4, 64, 4, 2], {"kernel_size": 1, "stride": 2}),
    "without bias": ([4, 64, 4, 4], {"kernel_size": 3, "padding": 1, "bias_attr": False}),
}


def pair(dtype: str = "float32", **settings: object) -> tuple[nn.Conv2D, nn.Conv2D]:
    """Paddle's layer and ours, with the same weights."""
    paddle.seed(1)
    paddles = nn.Conv2D(64, 96, **settings)
    paddles.to(dtype=dtype)
    ours = copy.deepcopy(paddles)
    quick_convolutions(ours)
    return paddles, ours


def learned(layer: nn.Conv2D, x: paddle.Tensor) -> list[paddle.Tensor]:
    """The output, and the gradients of the input and of each parameter."""
    x = x.detach()
    x.stop_gradient = False
    out = layer(x)
    (out * out.detach().cos()).sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]


def near(ours: paddle.Tensor, paddles: paddle.Tensor) -> float:
    assert ours.shape == paddles.shape
    return float((ours - paddles).abs().max() / paddles.abs().max())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "settings"), SHAPES.values(), ids=list(SHAPES))
def test_outputs_and_gradients_to_rounding(shape: list[int], settings: dict[str, object], dtype: str) -> None:
    paddles, ours = pair(dtype, **settings)
    assert "forward" in vars(ours)
    x = paddle.randn(shape).astype(dtype)
    for mine, theirs in zip(learned(ours, x), learned(paddles, x), strict=True):
        assert near(mine, theirs) <= (2e-6 if dtype == "float32" else 1e-14)


def test_it_is_one_product_and_only_for_a_small_output(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[list[int]] = []
    plain = paddle.matmul
    monkeypatch.setattr(paddle, "matmul", lambda x, y: products.append([*x.shape, *y.shape]) or plain(x, y))
    _, ours = pair(kernel_size=3, padding=1, bias_attr=False)
    ours(paddle.randn([5, 64, 4, 4]))
    assert products == [[96, 576, 576, 80]]
    ours(paddle.randn([5, 64, 4, 5]))
    ours(paddle.randn([0, 64, 4, 4]))
    assert len(products) == 1


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_what_is_frozen_stays_without_a_gradient(frozen: str) -> None:
    _, ours = pair(kernel_size=3, padding=1)
    x = paddle.randn([2, 64, 2, 2])
    given = {"weight": ours.weight, "bias": ours.bias, "x": x}
    for name, tensor in given.items():
        tensor.stop_gradient = name == frozen
    ours(x).sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is None} == {frozen}
    gradients = paddle.grad([ours(x).sum()], [t for name, t in given.items() if name not in (frozen, "bias")])
    assert all(gradient is not None for gradient in gradients)


def test_gradients_of_gradients_go_through() -> None:
    def penalty(layer: nn.Conv2D) -> list[paddle.Tensor]:
        paddle.seed(2)
        x = paddle.randn([3, 64, 3, 3])
        x.stop_gradient = False
        (first,) = paddle.grad([layer(x).tanh().sum()], [x], create_graph=True)
        first.square().sum().backward()
        return [first, x.grad, layer.weight.grad, layer.bias.grad]

    paddles, ours = pair(kernel_size=3, padding=1)
    for mine, theirs in zip(penalty(ours), penalty(paddles), strict=True):
        assert near(mine, theirs) <= 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"groups": 2}, {"dilation": 2}, {"data_format": "NHWC"}, {"padding_mode": "reflect", "padding": 1},
        {"padding": "SAME"}, {"padding": [1, 0, 1, 0]},
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_are_kept(settings: dict[str, object]) -> None:
    _, ours = pair(**{"kernel_size": 3, **settings})
    assert "forward" not in vars(ours)


def test_narrow_ones_and_those_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Conv2D):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(nn.Conv2D(3, 64, 3), Own(64, 64, 3), nn.Conv2D(64, 64, 3))
    quick_convolutions(model)
    assert ["forward" in vars(layer) for layer in model] == [False, False, True]
    monkeypatch.setattr(nn.Conv2D, "forward", lambda self, x: x)
    patched = nn.Conv2D(64, 64, 3)
    quick_convolutions(patched)
    assert "forward" not in vars(patched)


def test_copies_and_pickles_are_layers_of_their_own() -> None:
    _, ours = pair(kernel_size=3, padding=1)
    twin = copy.deepcopy(ours)
    twin.bias.set_value(paddle.full([96], 9.0))
    x = paddle.randn([2, 64, 2, 2])
    assert float((twin(x) - ours(x)).mean()) == pytest.approx(9.0 - float(ours.bias.mean()), rel=1e-4)
    model = nn.Sequential(ours)
    assert pickle.loads(pickle.dumps(model))[0].forward.__self__ is not ours


def test_a_traced_program_has_the_plain_layer() -> None:
    _, ours = pair(kernel_size=3, padding=1)
    spec = [paddle.static.InputSpec([None, 64, 2, 2], "float32")]
    traced = paddle.jit.to_static(copy.deepcopy(ours), full_graph=True, input_spec=spec)
    x = paddle.randn([6, 64, 2, 2])
    assert near(traced(x), F.conv2d(x, ours.weight, ours.bias, padding=1)) <= 2e-6
