"""Layers of all transformers: linear layers with initial weights, the layers of a block, bidirectional attention."""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
from paddle import nn
from paddle.nn.initializer import Normal

from models._attention import attention
from models._chain import Hidden, split
from models._generate import Cache

STD = 0.02


def linear(inputs: int, outputs: int, std: float = STD, bias: bool = True) -> nn.Linear:
    """A linear layer with initial weights of standard deviation `std`."""
    return nn.Linear(inputs, outputs, weight_attr=Normal(0.0, std), bias_attr=None if bias else False)


class TiedOutput(nn.Layer):
    """[n, t, width] → scores [n, t, vocab]: products with the token embeddings, plus an optional bias."""

    def __init__(self, token: nn.Embedding, bias: bool = False):
        super().__init__()
        self.weight = token.weight
        self.bias = self.create_parameter([token.weight.shape[0]], is_bias=True) if bias else None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        scores = paddle.matmul(x, self.weight, transpose_y=True)
        return scores if self.bias is None else scores + self.bias


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab] of a language model."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocab"}

    def __init__(self, norm: nn.Layer, out: nn.Layer):
        super().__init__()
        self.norm, self.out = norm, out

    def forward(self, hidden: Hidden, cache: Cache | None = None) -> paddle.Tensor:
        return self.out(self.norm(split(hidden)[0]))


class Block(nn.Layer):
    """The layers of a block for [n, t, width]; a model's `forward` decides where the norms are.

    The outputs of `qkv` are ordered head by head, [q | k | v] of one head together, so that any run of whole heads is a
    contiguous slice. The number of heads is read from the tensor; `head_width` is the width of each. Only the methods
    in `attention_methods` mix tokens.
    """

    cuts: ClassVar[dict[str, str]] = {"qkv": "heads", "out": "rowwise", "up": "colwise", "down": "rowwise"}
    attention_methods: ClassVar[tuple[str, ...]] = ("_attend",)

    def __init__(self, config: Any, residual_std: float = STD):
        """`residual_std`: the standard deviation of the weights that write to the residual stream."""
        super().__init__()
        width, hidden = config.width, config.hidden or 4 * config.width
        self.head_width = width // config.heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, config.epsilon) for _ in range(2))
        self.qkv, self.out = linear(width, 3 * width), linear(width, width, residual_std)
        self.up, self.down = linear(width, hidden), linear(hidden, width, residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def _attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        qkv = qkv.reshape([0, 0, -1, 3 * self.head_width])  # -1: the heads on this rank
        return attention(*qkv.split(3, axis=-1))


def residual_std(depth: int) -> float:
    """The standard deviation of weights that write to the residual stream, two in each of `depth` blocks (Radford et
    al. 2019)."""
    return STD / (2 * depth) ** 0.5
