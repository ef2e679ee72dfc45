"""GPT-2: a decoder-only transformer with learned positions (Radford et al. 2019), normed before each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models._chain import Chain
from models._checks import at_least_one, below_one, divides
from models._generate import Cache, Generates

STD = 0.02


def _linear(inputs: int, outputs: int, std: float = STD, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, weight_attr=Normal(0.0, std), bias_attr=None if bias else False)


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]: what each is, and where it stands."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocabulary"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))
        self.position = self.create_parameter(
            [config.length, config.width], default_initializer=Normal(0.0, STD)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        start = cache.start if cache else 0
        return self.dropout(self.token(tokens) + self.position[start : start + tokens.shape[1]])


class Block(nn.Layer):
    """[n, t, width] → the same: each token looks at those before it, then thinks by itself.

    The outputs of `qkv` lie head by head, [q | k | v] of one head beside each other: any run of whole heads is a
    contiguous slice. How many heads there are is read from the tensor; `head` is how wide each is.
    Tokens meet in the methods that `attends` names, and nowhere else.
    """

    cuts: ClassVar[dict[str, str]] = {"qkv": "heads", "out": "rows", "up": "columns", "down": "rows"}
    attends: ClassVar[tuple[str, ...]] = ("_attend",)

    def __init__(self, config: Config):
        super().__init__()
        width, last = config.width, STD / (2 * config.depth) ** 0.5  # 2 · depth of these are added up
        self.head = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width, last)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width, last)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)), cache)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate=True)))

    def _attend(self, qkv: paddle.Tensor, cache: Cache | None) -> paddle.Tensor:
        q, k, v = qkv.reshape([0, 0, -1, 3 * self.head]).split(3, axis=-1)  # however many heads live here
        if cache:
            k, v = cache.extend(self, k, v)
        causal = cache is None or q.shape[1] > 1  # a single new token comes after all others
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).flatten(2)


class Tied(nn.Layer):
    """[n, t, width] → scores [n, t, vocab]: how much each hidden vector is like each token's embedding."""

    def __init__(self, token: nn.Embedding):
        super().__init__()
        self.weight = token.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True)


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab]."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocabulary"}

    def __init__(self, width: int, out: nn.Layer):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), out

    def forward(self, x: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        return self.out(self.norm(x))


class GPT(Generates, Chain):
    """Scores [n, t, vocab] of each next token, for tokens int64 [n, t], t at most `length`."""

    def __init__(self, config: Config):
        embedding = Embedding(config)
        blocks = [Block(config) for _ in range(config.depth)]
        out = Tied(embedding.token) if config.tied else _linear(config.width, config.vocab, bias=False)
        super().__init__([embedding, *blocks, Head(config.width, out)])
        self.length = config.length


@dataclass(frozen=True, kw_only=True)
class Config:
    """`depth` blocks of `heads` heads; `length`: the longest text; `tied`: the scores use the embedding's weights.

    `dropout` is of the embedding and of what each layer adds; attention weights are never dropped.
    """

    vocab: int = 256
    width: int = 128
    depth: int = 4
    heads: int = 4
    length: int = 128
    dropout: float = 0.0
    tied: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "length")
        divides(self, "heads", "width")
        below_one(self, "dropout")

    def build(self) -> nn.Layer:
        return GPT(self)
