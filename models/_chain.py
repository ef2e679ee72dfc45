"""A model that is a chain of blocks, one behind the other: what a pipeline can cut between any two."""

from __future__ import annotations

from collections.abc import Iterable

import paddle
from paddle import nn


class Chain(nn.Layer):
    """`blocks` in their order; each takes what the one before gives."""

    def __init__(self, blocks: Iterable[nn.Layer]):
        super().__init__()
        self.blocks = nn.LayerList(list(blocks))

    def forward(self, inputs: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs
