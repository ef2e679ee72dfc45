"""What the language models share: writing on from a text, token by token, without reading any of it twice."""

from __future__ import annotations

from random import Random

import paddle
import paddle.nn.functional as F
from paddle import nn


class Cache:
    """The keys and values of every token read so far, [n, tokens, heads, head] for each block."""

    def __init__(self) -> None:
        self.start = 0  # the position of the next token to be read
        self._held: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}

    def extend(
        self, block: nn.Layer, keys: paddle.Tensor, values: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """All keys and values of this block, the new ones behind those it had."""
        if held := self._held.get(id(block)):
            keys, values = paddle.concat([held[0], keys], 1), paddle.concat([held[1], values], 1)
        self._held[id(block)] = keys, values
        return keys, values


class Generates:
    """Gives `generate` to a model of `blocks`, each called with (hidden, cache), that reads `length` tokens."""

    blocks: nn.LayerList
    length: int
    training: bool

    @paddle.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def generate(
        self,
        tokens: paddle.Tensor,
        steps: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> paddle.Tensor:
        """`tokens` int64 [n, t] with `steps` more behind them, [n, t + steps].

        Temperature 0 takes the likeliest token; above, one is drawn, of the `top_k` likeliest only if that is
        given; equal seeds draw equally on every device. A text that grows past the model's `length` is read
        again from half a length back.
        """
        was_training, draw = self.training, Random(seed)
        self.eval()  # type: ignore[attr-defined]
        cache, unread = Cache(), tokens
        for _ in range(steps):
            if cache.start + unread.shape[1] > self.length:
                cache, unread = Cache(), tokens[:, -max(1, self.length // 2) :]
            scores = self._read(unread, cache)[:, -1].astype("float32")
            unread = _likeliest(scores) if temperature == 0 else _drawn(scores / temperature, top_k, draw)
            tokens = paddle.concat([tokens, unread], 1)
        if was_training:
            self.train()  # type: ignore[attr-defined]
        return tokens

    def _read(self, tokens: paddle.Tensor, cache: Cache) -> paddle.Tensor:
        hidden = tokens
        for block in self.blocks:
            hidden = block(hidden, cache)
        cache.start += tokens.shape[1]
        return hidden


def _likeliest(scores: paddle.Tensor) -> paddle.Tensor:
    return scores.argmax(-1, keepdim=True)


def _drawn(scores: paddle.Tensor, top_k: int | None, draw: Random) -> paddle.Tensor:
    """One token a row [n, 1], each as often as softmax of its score [n, vocab] says."""
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1]), axis=-1)[0][:, -1:]
        scores = paddle.where(scores < least, paddle.full_like(scores, float("-inf")), scores)
    reached = F.softmax(scores, axis=-1).cumsum(-1)
    drawn = paddle.to_tensor([[draw.random()] for _ in range(scores.shape[0])], dtype=reached.dtype)
    # Sums of rounded numbers may end a little beside 1: what is drawn is scaled to where they do end.
    return (
        (reached <= drawn * reached[:, -1:])
        .astype("int64")
        .sum(-1, keepdim=True)
        .clip(max=scores.shape[-1] - 1)
    )
