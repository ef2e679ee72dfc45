"""What the exam's recipes train beside the shelves' models: dropout wherever a transformer can have it, frozen weights,
a loss whose count is known only from its call."""

from __future__ import annotations

from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn

from models import _transformer, gpt
from models._chain import Chain


class Block(_transformer.Block):
    """As gpt's; its attention weights and its hidden layer drop, too."""

    cuts: ClassVar[dict[str, str]] = {**_transformer.Block.cuts, "inner": "colwise"}

    def __init__(self, config: gpt.Config):
        super().__init__(config)
        self.inner = nn.Dropout(config.dropout)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)))))
        return x + self.dropout(self.down(self.inner(F.gelu(self.up(self.norm2(x))))))

    def _attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        q, k, v = qkv.reshape([0, 0, -1, 3 * self.head_width]).split(3, axis=-1)
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.inner.p, is_causal=True, training=self.training
        ).flatten(2)


class Dropping(Chain):
    """Scores [n, t, 32] for tokens int64 [n, t], t at most 8; the first `frozen` blocks do not learn."""

    def __init__(self, depth: int = 2, frozen: int = 0, dropout: float = 0.2):
        config = gpt.Config(vocab=32, width=16, depth=depth, heads=4, length=8, dropout=dropout)
        out = _transformer.linear(config.width, config.vocab, bias=False)
        blocks = [Block(config) for _ in range(depth)]
        head = gpt.Head(nn.LayerNorm(config.width, config.epsilon), out)
        super().__init__([gpt.Embedding(config), *blocks, head])
        for block in self.blocks[:frozen]:
            for parameter in block.parameters():
                parameter.stop_gradient = True


class Uncertain:
    """Cross-entropy of the samples whose own class has a probability below one half; which these are, only their
    outputs say."""

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        losses = F.cross_entropy(outputs, targets, reduction="none").flatten()
        counted = (losses.detach() > 0.6931).astype(losses.dtype)
        return (losses * counted).sum(), counted.sum()


class Wide(nn.Layer):
    """A perceptron for the digits whose hidden layer drops 8192 numbers of each sample; what is before it is frozen."""

    def __init__(self, dropout: float = 0.2):
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(64, 8192), nn.Dropout(dropout), nn.Linear(8192, 10)
        for parameter in self.body.parameters():
            parameter.stop_gradient = True

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.dropout(F.gelu(self.body(samples))))
