"""A model that is a chain of blocks, which a pipeline can cut between any two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import paddle
from paddle import nn


class Chain(nn.Layer):
    """Runs `blocks` in order; each takes the output of the one before."""

    def __init__(self, blocks: Iterable[nn.Layer]):
        super().__init__()
        self.blocks = nn.LayerList(list(blocks))

    def forward(self, inputs: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


Hidden: TypeAlias = paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]
"""The input of a block: [n, t, width], and the positions [n, t] where a sample has several documents."""


class DocumentChain(Chain):
    """A chain for tokens int64 [n, t], each row of one document or, with `positions`, of several one after another.

    `positions`, int64 [n, t], begin with 0 at each document, and no token sees another document. The first block
    returns them with its output, and each following one receives them and passes them on, but the last.
    """

    def forward(self, tokens: paddle.Tensor, positions: paddle.Tensor | None = None) -> paddle.Tensor:
        first, *following = self.blocks
        hidden = first(tokens) if positions is None else first(tokens, positions=positions)
        for block in following:
            hidden = block(hidden)
        return hidden


def split(hidden: Hidden) -> tuple[paddle.Tensor, paddle.Tensor | None]:
    """A block's input as its output [n, t, width] and the positions, or None."""
    x, positions = hidden if isinstance(hidden, tuple | list) else (hidden, None)
    return x, positions


def joined(x: paddle.Tensor, positions: paddle.Tensor | None) -> Hidden:
    """The inverse of `split`."""
    return x if positions is None else (x, positions)
