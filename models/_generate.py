"""Generation token by token, with a cache of keys and values, for the language models."""

from __future__ import annotations

from random import Random

import paddle
import paddle.nn.functional as F
from paddle import nn


class Cache:
    """The keys and values of every token read so far, [n, tokens, heads, head_width] for each block."""

    def __init__(self) -> None:
        self.start = 0  # the position of the next token to be read
        self._cached: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}

    def extend(
        self, block: nn.Layer, keys: paddle.Tensor, values: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Caches the new keys and values of this block; returns all of them, oldest first."""
        if cached := self._cached.get(id(block)):
            keys, values = paddle.concat([cached[0], keys], 1), paddle.concat([cached[1], values], 1)
        self._cached[id(block)] = keys, values
        return keys, values


class Generates:
    """Adds `generate` to a model of `blocks`, each called with (hidden, cache), for texts of up to `length` tokens."""

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
        """Returns [n, t + steps]: `tokens` int64 [n, t], followed by `steps` generated ones.

        Temperature 0 takes the likeliest token; above 0 one is sampled, from the `top_k` likeliest if given. Equal
        seeds sample equally on every device. When a text exceeds `length`, its last `length` // 2 tokens are read
        again.
        """
        was_training, random = self.training, Random(seed)
        self.eval()  # type: ignore[attr-defined]
        cache, unread = Cache(), tokens
        for _ in range(steps):
            if cache.start + unread.shape[1] > self.length:
                cache, unread = Cache(), tokens[:, -max(1, self.length // 2) :]
            scores = self._read(unread, cache)[:, -1].astype("float32")
            if temperature == 0:
                unread = scores.argmax(-1, keepdim=True)
            else:
                unread = _sample(scores / temperature, top_k, random)
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


def _sample(scores: paddle.Tensor, top_k: int | None, random: Random) -> paddle.Tensor:
    """One token per row [n, 1], with the probabilities softmax(scores) [n, vocab]."""
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1]), axis=-1)[0][:, -1:]
        scores = paddle.where(scores < least, paddle.full_like(scores, float("-inf")), scores)
    cumulative = F.softmax(scores, axis=-1).cumsum(-1)
    uniform = paddle.to_tensor([[random.random()] for _ in range(scores.shape[0])], dtype=cumulative.dtype)
    # Rounding leaves the last sum a little off 1, so the uniform numbers are scaled to it.
    below = (cumulative <= uniform * cumulative[:, -1:]).astype("int64")
    return below.sum(-1, keepdim=True).clip(max=scores.shape[-1] - 1)
