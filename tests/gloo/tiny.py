"""A tiny language model, whole or cut over the tensor axis, that `cases.py` trains in any layout.

Blocks are numbered alike in a plain Sequential and in fleet's PipelineLayer, so a parameter has one name in both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.layers import mpu
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from paddle.distributed.fleet.utils import sequence_parallel_utils as sp

VOCAB, WIDTH, DEPTH, LENGTH, BATCH, STEPS = 32, 16, 2, 8, 8, 4


class Block(nn.Layer):
    def __init__(self, cut: bool, sequence: bool):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if not cut:
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
            return
        up = sp.ColumnSequenceParallelLinear if sequence else mpu.ColumnParallelLinear
        down = sp.RowSequenceParallelLinear if sequence else mpu.RowParallelLinear
        self.up = up(WIDTH, 2 * WIDTH, gather_output=False, has_bias=True)
        self.down = down(2 * WIDTH, WIDTH, input_is_parallel=True, has_bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Embedding(nn.Layer):
    def __init__(self, cut: bool, sequence: bool):
        super().__init__()
        self.table = mpu.VocabParallelEmbedding(VOCAB, WIDTH) if cut else nn.Embedding(VOCAB, WIDTH)
        self.weight, self.sequence = self.table.weight, sequence
        del self.table._parameters["weight"]  # one name for it: ours
        object.__setattr__(self.table, "weight", self.weight)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.table(x)
        return sp.ScatterOp.apply(x.transpose([1, 0, 2])) if self.sequence else x


class Head(nn.Layer):
    def __init__(self, cut: bool, sequence: bool):
        super().__init__()
        self.sequence = sequence
        if cut:
            self.head = mpu.ColumnParallelLinear(WIDTH, VOCAB, gather_output=False, has_bias=False)
        else:
            self.head = nn.Linear(WIDTH, VOCAB, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(sp.GatherOp.apply(x).transpose([1, 0, 2]) if self.sequence else x)


def tied_head(cut: bool, embedding: Any, x: paddle.Tensor) -> paddle.Tensor:
    if cut:
        from paddle.distributed import fleet

        group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        x = mpu.mp_ops._c_identity(x, group=group)
    return paddle.matmul(x, embedding.weight, transpose_y=True)


def blocks(cut: bool = False, tied: bool = False, sequence: bool = False) -> list[Any]:
    """The model as the list of descriptions that PipelineLayer takes."""
    kind = {"cut": cut, "sequence": sequence}
    middle = [LayerDesc(Block, **kind) for _ in range(DEPTH)]
    if not tied:
        return [LayerDesc(Embedding, **kind), *middle, LayerDesc(Head, **kind)]
    first = SharedLayerDesc("tied", Embedding, shared_weight_attr="weight", **kind)
    head = partial(tied_head, cut)
    return [first, *middle, SharedLayerDesc("tied", Embedding, head, shared_weight_attr="weight", **kind)]


def plain(tied: bool = False) -> tuple[Any, Any]:
    """The whole model with its initial weights, and its forward."""
    layers = [one.build_layer() for one in blocks(tied=tied)]
    model = nn.Sequential(*(layers[:-1] if tied else layers))
    draw = np.random.default_rng(1)
    for name, parameter in model.named_parameters():
        value = draw.normal(0, 0.3, parameter.shape) + ("norm.weight" in name)
        parameter.set_value(value.astype("float32"))
    return model, (lambda x: tied_head(False, model[0], model(x))) if tied else model


def batches() -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    return [tuple(draw.integers(0, VOCAB, (2, BATCH, LENGTH))) for _ in range(STEPS)]


def make_optimizer(name: str, parameters: Any) -> Any:
    """SGD without a clip shows gradients that are too large as a whole; AdamW with a clip shows wrong norms."""
    if name == "sgd":
        return paddle.optimizer.SGD(0.5, parameters=parameters)
    clip = nn.ClipGradByGlobalNorm(0.3)
    return paddle.optimizer.AdamW(1e-2, parameters=parameters, grad_clip=clip, epsilon=1e-5)


def train_plain(optimizer: str, tied: bool) -> tuple[list[float], dict[str, Any]]:
    """Losses and final weights of one process."""
    model, forward = plain(tied)
    update, losses = make_optimizer(optimizer, model.parameters()), []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(forward(paddle.to_tensor(inputs)), paddle.to_tensor(targets))
        loss.backward()
        update.step()
        update.clear_grad()
        losses.append(loss.item())
    return losses, {name: parameter.numpy() for name, parameter in model.named_parameters()}
