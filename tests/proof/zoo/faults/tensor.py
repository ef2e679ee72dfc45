"""The tensor axis: sums that are missing or taken twice, slices of the wrong rank, norms over some of the parts."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np

from tests.proof.zoo.case import FaultTable, strategy
from tests.proof.zoo.patching import NORMS, UPDATE, last, ranks

MPU = "paddle.distributed.fleet.layers.mpu.mp_layers"
ROWS = f"{MPU}:RowParallelLinear.forward"
REDUCED = "paddle_dp.gloo.tensor_ops:reduced"
LOSS = "paddle_dp.axes.tensor.vocab_parallel_loss:VocabParallel.total"
TENSOR2 = strategy("gpt", tensor=2)
FAULTS = FaultTable()


@FAULTS.add(
    "rows not added up",
    "TTrace, missing all-reduce behind a row-parallel layer",
    TENSOR2,
    ROWS,
    guard="weights",
    where=("blocks.1.out",),
)
def rows_not_added_up(forward, layer, x):
    """A layer cut by rows passes on its own terms, twice, instead of the sum over the ranks."""
    import paddle.nn.functional as F

    return F.linear(x, layer.weight) * layer.world_size + layer.bias  # of the right size


@FAULTS.add("bias per rank", "Megatron-LM, row-parallel bias", TENSOR2, ROWS)
def bias_on_every_rank(forward, layer, x):
    """The bias of a layer cut by rows is added on every rank before the sum."""
    return forward(layer, x) + layer.bias * (layer.world_size - 1)


def _in_backward():
    """Whether a backward (Copy's), and not a forward (Sum's), has called the function that a fault replaces."""
    return sys._getframe(3).f_code.co_name == "backward"


@FAULTS.add(
    "input gradient kept",
    "TTrace, wrong gradients of column-parallel layers",
    TENSOR2,
    REDUCED,
    guard="weights",
    where=("norm", "tensor axis", "a sum over the axis is missing"),
)
def columns_keep_their_input_gradient(reduced, group, tensor, *operation):
    """What a layer cut by columns gives back to its input is not added up over the ranks."""
    return tensor.clone() if _in_backward() else reduced(group, tensor, *operation)


@FAULTS.add(
    "input gradient twice",
    "ANCHORS: gather's backward sums tensor copies",
    TENSOR2,
    REDUCED,
    where=("norm", "tensor"),
)
def summed_twice(reduced, group, tensor, *operation):
    """What a layer cut by columns gives back to its input is added up twice."""
    total = reduced(group, tensor, *operation)
    return total * 2 if _in_backward() else total


@FAULTS.add(
    "wrong embedding mask",
    "TTrace, wrong embedding mask under tensor parallelism",
    TENSOR2,
    f"{MPU}:VocabParallelEmbedding.forward",
)
def words_of_other_ranks(forward, layer, x):
    """A rank answers for words that it does not hold."""
    import paddle.nn.functional as F
    from paddle.distributed.fleet.layers.mpu import mp_ops

    # With its first word, or its last one, where zeros belong.
    local = (x - layer.vocab_start_index).clip(0, layer.weight.shape[0] - 1)
    return mp_ops._mp_allreduce(F.embedding(local, layer.weight), group=layer.model_parallel_group)


@FAULTS.add("softmax over half", "silent-fault catalogue, PAR", TENSOR2, LOSS)
def softmax_over_some_classes(total, loss, scores, numbers, *settings):
    """Each rank's softmax is over its own classes."""
    import paddle
    import paddle.nn.functional as F

    losses = F.cross_entropy(scores, numbers % scores.shape[-1], reduction="none", axis=-1).squeeze(-1)
    local = numbers // scores.shape[-1] == loss.group.rank
    return loss.all_reduce(paddle.where(local, losses, paddle.zeros_like(losses)).sum())


@FAULTS.add("classes twice", "silent-fault catalogue: cross-entropy of gathered scores", TENSOR2, LOSS)
def classes_counted_twice(total, loss, scores, numbers, *settings):
    """The loss counts every class once per rank: log 2 too high, with gradients that are right."""
    return total(loss, scores, numbers, *settings) + numbers.size * math.log(loss.group.nranks)


@FAULTS.add("norm without slices", "Megatron-LM #7452 (8), #5916, #7530", TENSOR2, NORMS)
def norm_without_slices(norms, norm, lists):
    """The clip's norm leaves out the slices of all ranks but the first."""
    mesh = norm.placed.mesh
    squares = _squares(lists) * float(mesh.coords["tensor"] == 0)
    return (mesh.sum_tensor(squares) / mesh.axes.data).sqrt()


def _squares(lists):
    """By list of parameters: the squared norm of this rank's part of their gradients."""
    import paddle

    from paddle_dp.core import gradients

    return paddle.stack([gradients.global_norm(parameters).square() for parameters in lists])


@FAULTS.add("norm of whole ones twice", "silent-fault catalogue, OPT", TENSOR2, NORMS)
def norm_of_full_parameters_twice(norms, norm, lists):
    """The clip's norm counts parameters that every rank holds whole once per rank."""
    mesh = norm.placed.mesh
    return (mesh.sum_tensor(_squares(lists)) / mesh.axes.data).sqrt()


@FAULTS.add(
    "ranks read apart",
    "Megatron-LM #7452 (7): scattered over the wrong group",
    TENSOR2,
    "paddle_dp.data.sampler:_order",
    guard="door",
)
def ranks_read_other_samples(order, *options):
    """The ranks of a tensor axis read different samples, as data ranks do."""
    return np.roll(order(*options), -1) if last() else order(*options)  # the last rank is one sample ahead


@FAULTS.add(
    "first slice everywhere",
    "silent-fault catalogue: parts drawn from one seed",
    TENSOR2,
    "paddle_dp.core.placement:Shard.cut",
)
def first_slice_everywhere(cut, shard, full):
    """Every rank begins with the first rank's slice of each weight."""
    return cut(replace(shard, rank=0), full)


@FAULTS.add(
    "wrong axis",
    "Megatron-LM #7452: a global group instead of the caller's",
    strategy("gpt", 4, tensor=2, data=2),
    "paddle_dp.exchange.pushed_gradients:PushedGradients.__init__",
    guard="weights",
)
def exchanged_over_the_wrong_axis(init, exchange, among, me, parameters, keepers, **more):
    """With data 2 and tensor 2, gradients meet over the tensor axis."""
    wrong = [me // 2 * 2, me // 2 * 2 + 1]  # the tensor axis is the innermost one
    init(exchange, wrong, me, parameters, [wrong] * len(parameters), **more)


@FAULTS.add("norms decay", "silent-fault catalogue, OPT", TENSOR2, "paddle.optimizer:AdamW.__init__")
def decayed_norms(init, optimizer, *options, **named):
    """Where the model is cut, weight decay takes norms and biases, too."""
    if ranks() > 1:
        named["apply_decay_param_fun"] = None
    init(optimizer, *options, **named)


@FAULTS.add(
    "bias stands still",
    "TTrace, parameters that are not updated",
    TENSOR2,
    UPDATE,
    where=("blocks.2.up.bias",),
)
def one_rank_forgets_its_bias(update, learner):
    """One rank's part of one bias gets no update."""
    bias = learner.model.blocks[2].up.bias
    before = bias.clone()
    update(learner)
    if last():
        bias.set_value(before)
