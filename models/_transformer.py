"""What gpt, vit and bert share: a block's layers with their initial weights, and attention of all tokens to all."""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

STD = 0.02


def linear(inputs: int, outputs: int, std: float = STD, bias: bool = True) -> nn.Linear:
    """A linear layer with weights of this standard deviation."""
    return nn.Linear(inputs, outputs, weight_attr=Normal(0.0, std), bias_attr=None if bias else False)


class Block(nn.Layer):
    """The layers of a block for [n, t, width]; a model says in its `forward` where the norms stand.

    The outputs of `qkv` lie head by head, [q | k | v] of one head beside each other: any run of whole heads is a
    contiguous slice. How many heads there are is read from the tensor; `head` is how wide each is.
    Only the methods in `attention_methods` mix tokens.
    """

    cuts: ClassVar[dict[str, str]] = {"qkv": "heads", "out": "rowwise", "up": "colwise", "down": "rowwise"}
    attention_methods: ClassVar[tuple[str, ...]] = ("_attend",)

    def __init__(self, config: Any, last: float = STD):
        """`last`: the standard deviation of the weights whose outputs are added to what the block is given."""
        super().__init__()
        width = config.width
        self.head = width // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width, last)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width, last)
        self.dropout = nn.Dropout(config.dropout)

    def _attend(self, qkv: paddle.Tensor) -> paddle.Tensor:
        qkv = qkv.reshape([0, 0, -1, 3 * self.head])  # however many heads live here
        return F.scaled_dot_product_attention(*qkv.split(3, axis=-1)).flatten(2)


def added_up(depth: int) -> float:
    """The standard deviation of weights whose outputs add up, two in each of `depth` blocks (Radford et al. 2019)."""
    return STD / (2 * depth) ** 0.5
