"""Stages: tied weights that drift apart or count twice, micro-batches that are lost, blocks in the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from tests.proof.zoo.case import Fault, strategy
from tests.proof.zoo.patching import NORMS, replaced

LOSS = "paddle_dp.axes.pipeline.runner:MicroBatchLoss.__call__"


def tied_apart() -> AbstractContextManager[None]:
    return replaced("paddle_dp.axes.pipeline.stages:TiedWeight.add_up", lambda add_up: lambda self: None)


def tied_on_the_last_stage_only() -> AbstractContextManager[None]:
    """The copies stay equal, but the embedding's own gradient is lost."""

    def make(add_up: Callable[..., Any]) -> Callable[..., Any]:
        def head_only(self: Any) -> None:
            import paddle.distributed as dist

            if dist.get_rank() == self.group.ranks[0]:
                self.parameter.grad.set_value(self.parameter.grad * 0)
            add_up(self)

        return head_only

    return replaced("paddle_dp.axes.pipeline.stages:TiedWeight.add_up", make)


def tied_counted_per_stage() -> AbstractContextManager[None]:
    def make(norm: Callable[..., Any]) -> Callable[..., Any]:
        def each(self: Any, lists: Any) -> Any:
            tied = [p for p in self.placed.trainable if not self.placed.placements.placement_of(p).first_copy]
            for parameter in tied:
                self.placed.placements.record(parameter, first_copy=True)
            found = norm(self, lists)
            for parameter in tied:
                self.placed.placements.record(parameter, first_copy=False)
            return found

        return each

    return replaced(NORMS, make)


def divided_by_micro_batches_twice() -> AbstractContextManager[None]:
    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        # The recipe has 2 micro-batches.
        return lambda self, outputs, targets: call(self, outputs, targets) / 2

    return replaced(LOSS, make)


def last_micro_batch_lost() -> AbstractContextManager[None]:
    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def losing(self: Any, outputs: Any, targets: Any) -> Any:
            total = call(self, outputs, targets)
            return total * (0.0 if len(self.sums) == 2 else 1.0)

        return losing

    return replaced(LOSS, make)


def targets_of_the_next_micro_batch() -> AbstractContextManager[None]:
    """The last stage reads one micro-batch ahead of the activations that reach it."""

    def make(begin: Callable[..., Any]) -> Callable[..., Any]:
        def ahead(self: Any, micro_batches: tuple[Any, ...], *more: Any) -> None:
            # The loss would refuse targets of other shapes.
            equal = len({tuple(each.targets.shape) for each in micro_batches}) == 1
            following = (*micro_batches[1:], micro_batches[0])
            read = [
                replace(each, targets=its.targets) for each, its in zip(micro_batches, following, strict=True)
            ]
            begin(self, tuple(read) if equal else micro_batches, *more)

        return ahead

    return replaced("paddle_dp.axes.pipeline.runner:MicroBatchLoss.open", make)


def blocks_change_places() -> AbstractContextManager[None]:
    """The blocks before and behind the cut are built into each other's stage, under their own names."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(self: Any, blocks: Any, bounds: Any, *more: Any) -> None:
            blocks, cut = list(blocks), bounds[1]
            blocks[cut - 2], blocks[cut - 1] = blocks[cut - 1], blocks[cut - 2]
            init(self, blocks, bounds, *more)

        return swapped

    return replaced("paddle_dp.axes.pipeline.stages:Stages.__init__", make)


def block_runs_twice() -> AbstractContextManager[None]:
    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def twice(self: Any, blocks: Any, bounds: Any, *more: Any) -> None:
            blocks = list(blocks)
            blocks[bounds[1] - 1] = blocks[bounds[1] - 2]
            init(self, blocks, bounds, *more)

        return twice

    return replaced("paddle_dp.axes.pipeline.stages:Stages.__init__", make)


def stages_keyed_by_their_own_numbers() -> AbstractContextManager[None]:
    """Each stage saves its blocks from number 0 on, as if it were the whole model."""

    def make(state: Callable[..., Any]) -> Callable[..., Any]:
        def local(self: Any) -> dict[str, Any]:
            first = min(self.blocks)
            return {
                f"blocks.{number - first}.{name}": tensor
                for number, block in self.blocks.items()
                for name, tensor in block.state_dict().items()
            }

        return local

    return replaced("paddle_dp.axes.pipeline.stages:LocalStages.state", make)


PIPELINE2 = strategy("gpt", pipeline=2)
TIED = PIPELINE2.with_("model.tied=true")
FAULTS = (
    Fault(
        name="tied weights drift",
        says="The two stages that share a weight do not add up its gradients.",
        source="TTrace, embedding and output layer untied",
        setting=TIED,
        patch=tied_apart,
        guard="weights",
    ),
    Fault(
        name="tied gradient lost",
        says="Both copies of a shared weight take the gradient of the output layer only.",
        source="TTrace, embedding and output layer untied",
        setting=TIED,
        patch=tied_on_the_last_stage_only,
        where=("token.weight",),
    ),
    Fault(
        name="tied norm twice",
        says="The clip's norm counts a shared weight once per stage.",
        source="fleet, tied weights under a pipeline",
        setting=TIED,
        patch=tied_counted_per_stage,
    ),
    Fault(
        name="divided by micro-batches twice",
        says="The loss is divided by the number of micro-batches, and the schedule does it once more.",
        source="TTrace, wrong loss scaling; Megatron-LM #7452 (3)",
        setting=PIPELINE2,
        patch=divided_by_micro_batches_twice,
    ),
    Fault(
        name="last micro-batch lost",
        says="The last micro-batch of each batch has no gradient.",
        source="silent-fault catalogue, PAR",
        setting=PIPELINE2,
        patch=last_micro_batch_lost,
    ),
    Fault(
        name="next micro-batch's targets",
        says="The last stage compares each micro-batch's outputs with the targets of the next.",
        source="silent-fault catalogue, PAR",
        setting=PIPELINE2,
        patch=targets_of_the_next_micro_batch,
    ),
    Fault(
        name="blocks change places",
        says="Two blocks of the first stage run in the wrong order.",
        source="TTrace, wrong division into stages",
        setting=PIPELINE2,
        patch=blocks_change_places,
    ),
    Fault(
        name="block runs twice",
        says="The first stage runs one block twice and the next not at all.",
        source="TTrace, wrong division into stages",
        setting=PIPELINE2,
        patch=block_runs_twice,
        guard="door",
        where=("it was never given a value",),
    ),
    Fault(
        name="local block numbers",
        says="Each stage saves its blocks under numbers that begin at 0.",
        source="silent-fault catalogue, CKPT: keyed by local layer numbers",
        setting=PIPELINE2,
        patch=stages_keyed_by_their_own_numbers,
        guard="door",
        exam="rehearsal",
    ),
)
