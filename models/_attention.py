"""Paddle's attention, with a faster transpose of heads and tokens on CPUs."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F


def attention(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, causal: bool = False) -> paddle.Tensor:
    """softmax(q kᵀ / √head_width) v of [n, t, heads, head_width] each, as [n, t, heads · head_width].

    k and v may have more tokens than q. With `causal` a token attends to itself and to earlier ones.
    """
    if not _strided_copies_are_slow(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).flatten(2)
    # The same bits and shapes: only the order in memory is head by head, as matmul needs it.
    q, k, v = (_swapped(x).transpose([0, 2, 1, 3]) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=_later(q, k) if causal else None)
    return _swapped(out.transpose([0, 2, 1, 3])).flatten(2)


def _strided_copies_are_slow(x: paddle.Tensor) -> bool:
    """True if transposes of this tensor would be copied element by element.

    Since Paddle 3.0 a transpose on CPUs is a view, and operations that need contiguous memory copy it element by
    element: a third of a GPT step. A traced program (paddle.jit, ONNX) keeps Paddle's operation.
    """
    if not paddle.in_dynamic_mode() or not x.place.is_cpu_place():
        return False
    return x.dtype in (paddle.float32, paddle.float64) and x.shape[1] > 1 and x.shape[2] > 1


def _later(q: paddle.Tensor, k: paddle.Tensor) -> paddle.Tensor:
    """The mask [1, 1, t, tokens of k] for `is_causal`. On CPUs Paddle makes one for each head of each sample, which
    takes as long as the products."""
    mask = paddle.full([1, 1, q.shape[1], k.shape[1]], -1e4, q.dtype)
    return paddle.triu(mask, diagonal=1)


def _swapped(x: paddle.Tensor) -> paddle.Tensor:
    """[n, a, b, d] → [n, b, a, d], contiguous. F.channel_shuffle is the only operation that transposes in memory in one
    pass: it reads t · h channels as t groups of h, and writes them as h groups of t."""
    n, a, b, d = x.shape
    return F.channel_shuffle(x.reshape([n, a * b, 1, d]), a).reshape([n, b, a, d])
