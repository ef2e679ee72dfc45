"""A norm's factors: the same numbers to the bit, their gradient to rounding."""

from __future__ import annotations

import paddle
import pytest

from models._scale import ELEMENTS, scaled


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [[ELEMENTS // 64, 64], [4, 100, 64], [2, 64]], ids=str)
def test_it_is_the_product_and_its_gradients(shape: list[int], dtype: str) -> None:
    paddle.seed(3)
    x, weight, far = paddle.randn(shape, dtype), paddle.randn([64], dtype), paddle.randn(shape, dtype)
    found = []
    for function in (scaled, paddle.multiply):
        one, other = x.detach(), weight.detach()
        one.stop_gradient = other.stop_gradient = False
        out = function(one, other)
        paddle.autograd.backward([out], [far])
        found.append((out, one.grad, other.grad))
    (out, gradient, factors), (expected, its, their) = found
    assert bool((out == expected).all()) and bool((gradient == its).all())
    assert float((factors - their).abs().max() / their.abs().max()) <= (2e-6 if dtype == "float32" else 1e-14)


def test_a_large_one_is_broadcast_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[list[int]] = []
    plain = paddle.matmul
    monkeypatch.setattr(paddle, "matmul", lambda x, y: products.append(x.shape) or plain(x, y))
    weight = paddle.create_parameter([64], "float32")
    scaled(paddle.randn([ELEMENTS // 64, 64]), weight)
    assert products == [[ELEMENTS // 64, 1]]
    scaled(paddle.randn([2, 64]), weight)
    with paddle.no_grad():
        scaled(paddle.randn([ELEMENTS // 64, 64]), weight)
    assert len(products) == 1
