"""The tensor axis: sums that are missing or taken twice, slices of the wrong rank, norms over some of the parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tests.proof.zoo.case import Fault, strategy
from tests.proof.zoo.patching import NORMS, UPDATE, last, ranks, replaced

MPU = "paddle.distributed.fleet.layers.mpu.mp_layers"


def rows_not_added_up() -> AbstractContextManager[None]:
    """A layer cut by rows hands on its own terms only, times the number of ranks so that sizes look right."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def alone(self: Any, x: Any) -> Any:
            import paddle.nn.functional as F

            return F.linear(x, self.weight) * self.world_size + self.bias

        return alone

    return replaced(f"{MPU}:RowParallelLinear.forward", make)


def bias_on_every_rank() -> AbstractContextManager[None]:
    """The bias is added before the ranks' terms are: it counts once per rank."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, x: forward(self, x) + self.bias * (self.world_size - 1)

    return replaced(f"{MPU}:RowParallelLinear.forward", make)


def columns_keep_their_input_gradient() -> AbstractContextManager[None]:
    """Megatron's f is left out: what a layer cut by columns gives back to its input is this rank's part only."""
    return replaced("paddle_dp.gloo.tensor_ops:reduced", _only_forward)


def _only_forward(reduced: Callable[..., Any]) -> Callable[..., Any]:
    """`reduced` where it is called by a forward (Sum), and the tensor itself where by a backward (Copy)."""
    import inspect

    def partly(group: Any, tensor: Any, *operation: Any) -> Any:
        caller = inspect.stack()[1].function
        return tensor.clone() if caller == "backward" else reduced(group, tensor, *operation)

    return partly


def summed_twice() -> AbstractContextManager[None]:
    import inspect

    def make(reduced: Callable[..., Any]) -> Callable[..., Any]:
        def twice(group: Any, tensor: Any, *operation: Any) -> Any:
            found = reduced(group, tensor, *operation)
            return found * 2 if inspect.stack()[1].function == "backward" else found

        return twice

    return replaced("paddle_dp.gloo.tensor_ops:reduced", make)


def words_of_other_ranks() -> AbstractContextManager[None]:
    """A rank answers for words that it does not hold, with its first word, where zeros belong."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def unmasked(self: Any, x: Any) -> Any:
            import paddle.nn.functional as F
            from paddle.distributed.fleet.layers.mpu import mp_ops

            held = self.weight.shape[0]
            mine = (x - self.vocab_start_index).clip(0, held - 1)
            return mp_ops._mp_allreduce(F.embedding(mine, self.weight), group=self.model_parallel_group)

        return unmasked

    return replaced(f"{MPU}:VocabParallelEmbedding.forward", make)


def softmax_over_some_classes() -> AbstractContextManager[None]:
    def make(total: Callable[..., Any]) -> Callable[..., Any]:
        def local(self: Any, scores: Any, numbers: Any, ignored: int) -> Any:
            import paddle
            import paddle.nn.functional as F

            found = F.cross_entropy(scores, numbers % scores.shape[-1], reduction="none", axis=-1).squeeze(-1)
            mine = numbers // scores.shape[-1] == self.group.rank
            return self.all_reduce(paddle.where(mine, found, paddle.zeros_like(found)).sum())

        return local

    return replaced("paddle_dp.axes.tensor.vocab_parallel_loss:VocabParallel.total", make)


def classes_counted_twice() -> AbstractContextManager[None]:
    """The cross-entropy of scores that were gathered already: the sum over classes is t times too large."""

    def make(total: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(self: Any, scores: Any, numbers: Any, ignored: int) -> Any:
            import math

            return total(self, scores, numbers, ignored) + numbers.size * math.log(self.group.nranks)

        return gathered

    return replaced("paddle_dp.axes.tensor.vocab_parallel_loss:VocabParallel.total", make)


def norm_without_slices() -> AbstractContextManager[None]:
    """The clip's norm takes every slice for a copy of the first rank's."""

    def make(norm: Callable[..., Any]) -> Callable[..., Any]:
        def first_only(self: Any, lists: Any) -> Any:
            squares = _squares(lists) * float(self.placed.mesh.coords["tensor"] == 0)
            return (self.placed.mesh.sum_tensor(squares) / self.placed.mesh.axes.data).sqrt()

        return first_only

    return replaced(NORMS, make)


def _squares(lists: Any) -> Any:
    """Of each list of parameters, the squared norm over what lies here of their gradients."""
    import paddle

    from paddle_dp.core import gradients

    return paddle.stack([gradients.global_norm(parameters).square() for parameters in lists])


def norm_of_whole_parameters_twice() -> AbstractContextManager[None]:
    def make(norm: Callable[..., Any]) -> Callable[..., Any]:
        def all_of_them(self: Any, lists: Any) -> Any:
            return (self.placed.mesh.sum_tensor(_squares(lists)) / self.placed.mesh.axes.data).sqrt()

        return all_of_them

    return replaced(NORMS, make)


def ranks_read_other_samples() -> AbstractContextManager[None]:
    """The last rank is one sample ahead."""

    def make(order: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: np.roll(order(*given), -1) if last() else order(*given)

    return replaced("paddle_dp.data.sampler:_order", make)


def first_slice_everywhere() -> AbstractContextManager[None]:
    """Every rank begins with the first rank's slices, as if each had drawn its part from one seed."""

    def make(of: Callable[..., Any]) -> Callable[..., Any]:
        def first(self: Any, whole: Any) -> Any:
            from dataclasses import replace

            return of(replace(self, rank=0), whole)

        return first

    return replaced("paddle_dp.core.placement:Shard.cut", make)


def exchanged_over_the_wrong_axis() -> AbstractContextManager[None]:
    """On data 2 x tensor 2, gradients meet over the tensor axis: the group that came first was taken."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def confused(self: Any, among: Any, me: int, parameters: Any, keepers: Any, **more: Any) -> None:
            wrong = [me // 2 * 2, me // 2 * 2 + 1]  # the tensor axis is the innermost one
            init(self, wrong, me, parameters, [wrong] * len(parameters), **more)

        return confused

    return replaced("paddle_dp.exchange.pushed_gradients:PushedGradients.__init__", make)


def decayed_norms() -> AbstractContextManager[None]:
    """Weight decay of parameters whose names ask for none, where the model is cut."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def everywhere(self: Any, *given: Any, **named: Any) -> None:
            if ranks() > 1:
                named["apply_decay_param_fun"] = None
            init(self, *given, **named)

        return everywhere

    return replaced("paddle.optimizer:AdamW.__init__", make)


def one_rank_forgets_its_bias() -> AbstractContextManager[None]:
    """The last rank's part of a bias cut by columns never moves."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def still(self: Any) -> None:
            bias = self.model.blocks[2].up.bias
            kept = bias.clone()
            step(self)
            if last():
                bias.set_value(kept)

        return still

    return replaced(UPDATE, make)


TENSOR2 = strategy("gpt", tensor=2)
FAULTS = (
    Fault(
        name="rows not added up",
        says="A layer cut by rows passes on its own terms, twice, instead of the sum over the ranks.",
        source="TTrace, missing all-reduce behind a row-parallel layer",
        setting=TENSOR2,
        patch=rows_not_added_up,
        guard="weights",
        where=("blocks.1.out",),
    ),
    Fault(
        name="bias per rank",
        says="The bias of a layer cut by rows is added on every rank before the sum.",
        source="Megatron-LM, row-parallel bias",
        setting=TENSOR2,
        patch=bias_on_every_rank,
    ),
    Fault(
        name="input gradient kept",
        says="What a layer cut by columns gives back to its input is not added up over the ranks.",
        source="TTrace, wrong gradients of column-parallel layers",
        setting=TENSOR2,
        patch=columns_keep_their_input_gradient,
        guard="weights",
        where=("norm", "tensor axis", "a sum over the axis is missing"),
    ),
    Fault(
        name="input gradient twice",
        says="What a layer cut by columns gives back to its input is added up twice.",
        source="ANCHORS: gather's backward sums tensor copies",
        setting=TENSOR2,
        patch=summed_twice,
        where=("norm", "tensor"),
    ),
    Fault(
        name="wrong embedding mask",
        says="A rank answers for words that it does not hold.",
        source="TTrace, wrong embedding mask under tensor parallelism",
        setting=TENSOR2,
        patch=words_of_other_ranks,
    ),
    Fault(
        name="softmax over half",
        says="Each rank's softmax is over its own classes.",
        source="silent-fault catalogue, PAR",
        setting=TENSOR2,
        patch=softmax_over_some_classes,
    ),
    Fault(
        name="classes twice",
        says="The loss counts every class once per rank: log 2 too high, with gradients that are right.",
        source="silent-fault catalogue: cross-entropy of gathered scores",
        setting=TENSOR2,
        patch=classes_counted_twice,
    ),
    Fault(
        name="norm without slices",
        says="The clip's norm leaves out the slices of all ranks but the first.",
        source="Megatron-LM #7452 (8), #5916, #7530",
        setting=TENSOR2,
        patch=norm_without_slices,
    ),
    Fault(
        name="norm of whole ones twice",
        says="The clip's norm counts parameters that every rank holds whole once per rank.",
        source="silent-fault catalogue, OPT",
        setting=TENSOR2,
        patch=norm_of_whole_parameters_twice,
    ),
    Fault(
        name="ranks read apart",
        says="The ranks of a tensor axis read different samples, as data ranks do.",
        source="Megatron-LM #7452 (7): scattered over the wrong group",
        setting=TENSOR2,
        patch=ranks_read_other_samples,
        guard="door",
    ),
    Fault(
        name="first slice everywhere",
        says="Every rank begins with the first rank's slice of each weight.",
        source="silent-fault catalogue: parts drawn from one seed",
        setting=TENSOR2,
        patch=first_slice_everywhere,
    ),
    Fault(
        name="wrong axis",
        says="With data 2 and tensor 2, gradients meet over the tensor axis.",
        source="Megatron-LM #7452: a global group instead of the caller's",
        setting=strategy("gpt", 4, tensor=2, data=2),
        patch=exchanged_over_the_wrong_axis,
        guard="weights",
    ),
    Fault(
        name="norms decay",
        says="Where the model is cut, weight decay takes norms and biases, too.",
        source="silent-fault catalogue, OPT",
        setting=TENSOR2,
        patch=decayed_norms,
    ),
    Fault(
        name="bias stands still",
        says="One rank's part of one bias gets no update.",
        source="TTrace, parameters that are not updated",
        setting=TENSOR2,
        patch=one_rank_forgets_its_bias,
        where=("blocks.2.up.bias",),
    ),
)
