"""A model that is a chain of blocks, which a pipeline can cut between any two."""

from __future__ import annotations

from collections.abc import Iterable

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
