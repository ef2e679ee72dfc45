"""On CPUs attention moves its heads the fast way, and computes Paddle's own numbers to the bit."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
import pytest

from models._attention import attention


def both(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, causal: bool) -> list[list[paddle.Tensor]]:
    """Output and gradients of q, k, v: of ours, then of Paddle's."""
    found = []
    for function in (
        attention,
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=causal).flatten(2),
    ):
        inputs = [x.detach() for x in (q, k, v)]
        for x in inputs:
            x.stop_gradient = False
        out = function(*inputs, causal) if function is attention else function(*inputs)
        (out * out.detach().cos()).sum().backward()
        found.append([out, *(x.grad for x in inputs)])
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("tokens", "heads"), [(6, 4), (1, 4), (6, 1), (37, 3)])
def test_the_same_bits(tokens: int, heads: int, dtype: str, causal: bool) -> None:
    paddle.seed(0)
    q, k, v = (paddle.randn([2, tokens, heads, 8]).astype(dtype) for _ in range(3))
    ours, paddles = both(q, k, v, causal)
    for mine, its in zip(ours, paddles, strict=True):
        assert mine.shape == its.shape and bool((mine == its).all())


def test_more_keys_than_queries() -> None:
    q, k, v = paddle.randn([2, 3, 4, 8]), paddle.randn([2, 5, 4, 8]), paddle.randn([2, 5, 4, 8])
    ours, paddles = both(q, k, v, False)
    assert all(bool((mine == its).all()) for mine, its in zip(ours, paddles, strict=True))


def test_a_traced_program_has_paddle_s_own_attention() -> None:
    q = paddle.randn([2, 6, 4, 8])
    traced = paddle.jit.to_static(
        attention, full_graph=True, input_spec=[paddle.static.InputSpec.from_tensor(q)] * 3
    )
    assert "shuffle" not in str(traced.concrete_program.main_program)
    assert bool(paddle.allclose(traced(q, q, q), attention(q, q, q), atol=1e-6))
