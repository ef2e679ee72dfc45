"""Two towers that embed the two sides of a pair, with shared or separate weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import nn

from models._checks import at_least_one, check_widths
from models.mlp import gelu_layers


class Siamese(nn.Layer):
    """Two embeddings [n, embedding] for two samples [n, inputs] of each pair.

    Its branches are the towers; with `shared` weights they are two calls of one layer.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], embedding: int, shared: bool):
        super().__init__()
        widths = [inputs, *hidden, embedding]
        self.left = nn.Sequential(*gelu_layers(widths)[:-1])
        if not shared:
            self.right = nn.Sequential(*gelu_layers(widths)[:-1])
        self.branches = (("left",), ("left" if shared else "right",))

    def forward(self, one: paddle.Tensor, other: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        second = self.left if self.branches[1] == ("left",) else self.right
        return self.left(one), second(other)


@dataclass(frozen=True, kw_only=True)
class Config:
    inputs: int = 64
    """Numbers in a sample."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of each tower's hidden layers."""

    embedding: int = 16
    """Numbers in an embedding."""

    shared: bool = True
    """One tower for both sides; else each side has separate weights."""

    def __post_init__(self) -> None:
        at_least_one(self, "inputs", "embedding")
        check_widths(self, "hidden")

    def build(self) -> nn.Layer:
        return Siamese(self.inputs, self.hidden, self.embedding, self.shared)
