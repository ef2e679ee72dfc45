"""On CPUs biases are learned by a product: the same layer, and the same gradients to rounding."""

from __future__ import annotations

import copy
import pickle

import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.model.bias_on_cpu import ELEMENTS, linear, quick_biases


def learned(
    function: object, shape: list[int], dtype: str, **frozen: bool
) -> tuple[paddle.Tensor, dict[str, paddle.Tensor | None]]:
    """The output, and the gradients by name, of a layer of 32 inputs and 64 outputs."""
    paddle.seed(1)
    given = {"x": paddle.randn([*shape, 32]), "weight": paddle.randn([32, 64]), "bias": paddle.randn([64])}
    given = {name: value.astype(dtype).detach() for name, value in given.items()}
    for name, value in given.items():
        value.stop_gradient = frozen.get(name, False)
    out = function(*given.values())  # type: ignore[operator]
    if not out.stop_gradient:
        (out * out.detach().cos()).sum().backward()
    return out, {name: value.grad for name, value in given.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [[ELEMENTS // 64], [4, 128], [2, 3, 100], [3]], ids=str)
def test_outputs_to_the_bit_and_gradients_to_rounding(shape: list[int], dtype: str) -> None:
    ours, gradients = learned(linear, shape, dtype)
    paddles, expected = learned(F.linear, shape, dtype)
    assert ours.shape == paddles.shape and bool((ours == paddles).all())
    for name, gradient in gradients.items():
        assert gradient is not None and expected[name] is not None
        near = float((gradient - expected[name]).abs().max() / expected[name].abs().max())
        assert near <= (2e-6 if dtype == "float32" else 1e-14), name
        assert name == "bias" or bool((gradient == expected[name]).all())


@pytest.mark.parametrize(
    "frozen", [("bias",), ("weight",), ("x", "weight"), ("x", "weight", "bias")], ids=str
)
def test_what_is_frozen_stays_without_a_gradient(frozen: tuple[str, ...]) -> None:
    _, gradients = learned(linear, [512], "float32", **dict.fromkeys(frozen, True))
    assert {name for name, gradient in gradients.items() if gradient is None} == set(frozen)


def test_an_empty_batch_is_as_before() -> None:
    out = linear(paddle.zeros([0, 32]), paddle.ones([32, 64]), paddle.ones([64]))
    assert out.shape == [0, 64]


def test_gradients_of_gradients_go_through() -> None:
    def penalty(function: object) -> paddle.Tensor:
        paddle.seed(2)
        x, weight, bias = paddle.randn([512, 32]), paddle.randn([32, 64]), paddle.randn([64])
        for tensor in (x, weight, bias):
            tensor.stop_gradient = False
        out = function(x, weight, bias).tanh().sum()  # type: ignore[operator]
        (first,) = paddle.grad([out], [x], create_graph=True)
        first.square().sum().backward()
        return bias.grad

    ours, paddles = penalty(linear), penalty(F.linear)
    assert float((ours - paddles).abs().max() / paddles.abs().max()) <= 1e-5


def test_a_model_s_plain_layers_take_it_once_and_so_do_their_copies() -> None:
    class Own(nn.Linear):
        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(nn.Linear(32, 64), Own(64, 64), nn.Linear(64, 2, bias_attr=False))
    quick_biases(model)
    first = vars(model[0])["forward"]
    quick_biases(model)
    assert vars(model[0])["forward"] is first and "forward" not in vars(model[1])
    twin = copy.deepcopy(model)
    twin[0].bias.set_value(paddle.full([64], 9.0))
    x = paddle.randn([512, 32])
    assert float((twin[0](x) - model[0](x)).mean()) == pytest.approx(
        9.0 - float(model[0].bias.mean()), rel=1e-4
    )


def test_a_forward_that_somebody_gave_the_class_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * 2)
    model = nn.Linear(32, 64)
    quick_biases(model)
    assert "forward" not in vars(model)


def test_a_model_with_it_is_pickled() -> None:
    model = nn.Sequential(nn.Linear(32, 64))
    quick_biases(model)
    twin = pickle.loads(pickle.dumps(model))
    assert twin[0].forward.__self__ is twin[0]


def test_a_traced_program_has_the_plain_layer() -> None:
    model = nn.Linear(32, 64)
    quick_biases(model)
    spec = [paddle.static.InputSpec([None, 32], "float32")]
    traced = paddle.jit.to_static(model, full_graph=True, input_spec=spec)
    x = paddle.randn([600, 32])
    assert bool(paddle.allclose(traced(x), F.linear(x, model.weight, model.bias), atol=1e-6))
