"""Models that look tokens up in tables of embeddings, and some that use a table in another way, too."""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle import nn


class Lookup(nn.Layer):
    """Scores [n, t, vocab] of tokens int64 [n, t]: a table with a padding row, one for pairs of tokens that is read
    twice in a forward, and one that is the output layer's as well."""

    def __init__(self, vocab: int = 200, width: int = 8):
        super().__init__()
        self.token = nn.Embedding(vocab, width, padding_idx=7)
        self.pair = nn.Embedding(vocab, width)
        self.shared = nn.Embedding(vocab, width)
        self.norm, self.out = nn.LayerNorm(width), Output(self.shared)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        pairs = self.pair(tokens // 2) + self.pair(x=paddle.flip(tokens, [1]) // 2)
        return self.out(self.norm(self.token(tokens) + pairs + self.shared(tokens)))


class Output(nn.Layer):
    def __init__(self, token: nn.Embedding):
        super().__init__()
        self.weight = token.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(x, self.weight, transpose_y=True)


class Plain(nn.Layer):
    """Scores [n, t, vocab] from one table that is read by its layer alone."""

    def __init__(self, vocab: int = 200, width: int = 8):
        super().__init__()
        self.token, self.out = nn.Embedding(vocab, width), nn.Linear(width, vocab)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.token(tokens))


class Beside(Plain):
    """Also looks up other rows, past the layer."""

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.token(tokens) + F.embedding((tokens + 1) % 200, self.token.weight))


class Nearest(Plain):
    """Also reads all rows without a gradient, and takes the most similar one; an argmax of NaN would be no NaN."""

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        h = self.token(tokens)
        with paddle.no_grad():
            nearest = paddle.matmul(h, self.token.weight, transpose_y=True).argmax(-1)
            mean = F.relu(self.token.weight).mean(0)
        return self.out(h + self.token(nearest) + mean)


class Kept(Plain):
    """Also reads all rows without a gradient, of a tensor that was kept aside."""

    def __init__(self, vocab: int = 200, width: int = 8):
        super().__init__(vocab, width)
        self.tables = [self.token.weight]

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.token(tokens) - self.tables[0].detach().mean(0))
