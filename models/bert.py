"""BERT: a bidirectional transformer that predicts masked tokens (Devlin et al., arXiv:1810.04805), post-norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models import _transformer
from models._chain import Chain
from models._checks import at_least_one, check_dropout, divides
from models._transformer import STD, linear


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]: token and position embeddings, added. Texts have one segment."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))
        self.position = self.create_parameter(
            [config.length, config.width], default_initializer=Normal(0.0, STD)
        )
        self.norm, self.dropout = nn.LayerNorm(config.width), nn.Dropout(config.dropout)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.dropout(self.norm(self.token(tokens) + self.position[: tokens.shape[1]]))


class Block(_transformer.Block):
    """[n, t, width] → the same: bidirectional self-attention, then an MLP."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm1(x + self.dropout(self.out(self._attend(self.qkv(x)))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab] of each original token."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.dense, self.norm = linear(config.width, config.width), nn.LayerNorm(config.width)
        self.out = linear(config.width, config.vocab)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.norm(F.gelu(self.dense(x))))


class BERT(Chain):
    """Scores [n, t, vocab] of each token before masking, for tokens int64 [n, t]."""

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        super().__init__([Embedding(config), *blocks, Head(config)])


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    vocab: int = 264
    """Tokens of the vocabulary, including the mask."""

    width: int = 128
    """Width of a token between the blocks."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Attention heads; must divide `width`."""

    length: int = 128
    """Longest text, in tokens."""

    dropout: float = 0.0
    """Dropout probability of the embedding and of each layer's output."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "length")
        divides(self, "heads", "width")
        check_dropout(self)

    def build(self) -> nn.Layer:
        return BERT(self)
