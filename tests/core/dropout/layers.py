"""A small model that drops wherever a transformer can: embedding, attention, between cut layers, what is added."""

from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn

from models import _transformer, gpt
from models._chain import Chain
from paddle_dp.losses.cross_entropy import Config as CrossEntropy

CONFIG = gpt.Config(vocab=32, width=32, depth=4, heads=4, length=16, dropout=0.3)


class Block(_transformer.Block):
    """As gpt's, and its attention weights and hidden layer drop, too."""

    cuts: ClassVar[dict[str, str]] = {**_transformer.Block.cuts, "inner": "colwise"}

    def __init__(self, config):
        super().__init__(config)
        self.inner = nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)))))
        path = (
            paddle.floor(0.8 + paddle.rand([x.shape[0], 1, 1])) / 0.8
        )  # drop path, as PaddleClas's models have it
        return x + path * self.dropout(self.down(self.inner(F.gelu(self.up(self.norm2(x))))))

    def _attend(self, qkv):
        q, k, v = qkv.reshape([0, 0, -1, 3 * self.head_width]).split(3, axis=-1)
        drops = {"dropout_p": 0.2, "training": self.attention_drops()}
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **drops).flatten(2)

    def attention_drops(self):
        return self.training


class MonteCarloBlock(Block):
    """It drops in evaluation, too, if `monte_carlo` has made its layers."""

    def attention_drops(self):
        return True


class MonteCarloDropout(nn.Dropout):
    def forward(self, x):
        return F.dropout(x, self.p)  # training=True is Paddle's default


def monte_carlo():
    """The chain of `dropping`, with dropout in evaluation, too."""
    model = dropping(MonteCarloBlock)
    for layer in model.sublayers():
        if type(layer) is nn.Dropout:
            layer.__class__ = MonteCarloDropout
    return model


def dropping(kind=Block):
    """A chain of an embedding, four blocks and a head, from a fixed seed."""
    paddle.seed(3)
    blocks = [kind(CONFIG) for _ in range(CONFIG.depth)]
    out = _transformer.linear(CONFIG.width, CONFIG.vocab, bias=False)
    head = gpt.Head(nn.LayerNorm(CONFIG.width, CONFIG.epsilon), out)
    return Chain([gpt.Embedding(CONFIG), *blocks, head])


def loss():
    return CrossEntropy().build()
