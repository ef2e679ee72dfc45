"""Paddle's attention, with a faster transpose of heads and tokens on CPUs."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F


def attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    causal: bool = False,
    positions: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """softmax(q kᵀ / √head_width) v of [n, t, heads, head_width] each, as [n, t, heads · head_width].

    k and v may have more tokens than q. With `causal` a token attends to itself and to earlier ones; with `positions`,
    int64 [n, t], of several documents in a sample, only to its document's.
    """
    mask = None if positions is None else _other_documents(positions, q.dtype)
    if not _strided_copies_are_slow(q):
        is_causal = causal and mask is None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal).flatten(2)
    # The same bits and shapes: only the order in memory is head by head, as matmul needs it.
    q, k, v = (_swapped(x).transpose([0, 2, 1, 3]) for x in (q, k, v))
    mask = _later(q, k) if causal and mask is None else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
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


def _other_documents(positions: paddle.Tensor, dtype: paddle.dtype) -> paddle.Tensor:
    """The mask [n, 1, t, t] for documents one after another: a token at position p sees itself and p tokens before."""
    numbers = paddle.arange(positions.shape[1], dtype=positions.dtype)
    before = numbers.unsqueeze(1) - numbers  # [t, t]: how far the other token is before this one
    seen = (before >= 0).logical_and(before <= positions.unsqueeze(-1))
    return (seen.logical_not().astype(dtype) * -1e4).unsqueeze(1)  # paddle.where has no 16 bits on CPUs


def _swapped(x: paddle.Tensor) -> paddle.Tensor:
    """[n, a, b, d] → [n, b, a, d], contiguous. F.channel_shuffle is the only operation that transposes in memory in one
    pass: it reads t · h channels as t groups of h, and writes them as h groups of t."""
    n, a, b, d = x.shape
    return F.channel_shuffle(x.reshape([n, a * b, 1, d]), a).reshape([n, b, a, d])
