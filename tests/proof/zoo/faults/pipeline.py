"""Stages: tied weights that drift apart or count twice, micro-batches that are lost, blocks in the wrong place."""

from __future__ import annotations

from dataclasses import replace

from tests.proof.zoo.case import FaultTable, strategy
from tests.proof.zoo.patching import NORMS

LOSS = "paddle_dp.axes.pipeline.runner:MicroBatchLoss"
TIED_SUM = "paddle_dp.axes.pipeline.stages:TiedWeight.add_up"
STAGES = "paddle_dp.axes.pipeline.stages:Stages.__init__"
PIPELINE2 = strategy("gpt", pipeline=2)
TIED = PIPELINE2.with_("model.tied=true")
FAULTS = FaultTable()


@FAULTS.add(
    "tied weights drift", "TTrace, embedding and output layer untied", TIED, TIED_SUM, guard="weights"
)
def tied_apart(add_up, tied):
    """The two stages that share a weight do not add up its gradients."""


@FAULTS.add(
    "tied gradient lost",
    "TTrace, embedding and output layer untied",
    TIED,
    TIED_SUM,
    where=("token.weight",),
)
def tied_on_the_last_stage_only(add_up, tied):
    """Both copies of a shared weight take the gradient of the output layer only."""
    import paddle.distributed as dist

    if dist.get_rank() == tied.group.ranks[0]:
        tied.parameter.grad.set_value(tied.parameter.grad * 0)
    add_up(tied)


@FAULTS.add("tied norm twice", "fleet, tied weights under a pipeline", TIED, NORMS)
def tied_counted_per_stage(norms, norm, lists):
    """The clip's norm counts a shared weight once per stage."""
    placements = norm.placed.placements
    tied = [p for p in norm.placed.trainable if not placements.placement_of(p).first_copy]
    for parameter in tied:
        placements.record(parameter, first_copy=True)
    total = norms(norm, lists)
    for parameter in tied:
        placements.record(parameter, first_copy=False)
    return total


@FAULTS.add(
    "divided by micro-batches twice",
    "TTrace, wrong loss scaling; Megatron-LM #7452 (3)",
    PIPELINE2,
    f"{LOSS}.__call__",
)
def divided_by_micro_batches_twice(loss, owner, outputs, targets):
    """The loss is divided by the number of micro-batches, and the schedule does it once more."""
    return loss(owner, outputs, targets) / 2  # the recipe has 2 micro-batches


@FAULTS.add("last micro-batch lost", "silent-fault catalogue, PAR", PIPELINE2, f"{LOSS}.__call__")
def last_micro_batch_lost(loss, owner, outputs, targets):
    """The last micro-batch of each batch has no gradient."""
    total = loss(owner, outputs, targets)
    return total * (0.0 if len(owner.sums) == 2 else 1.0)


@FAULTS.add("next micro-batch's targets", "silent-fault catalogue, PAR", PIPELINE2, f"{LOSS}.open")
def targets_of_the_next_micro_batch(begin, loss, micro_batches, *more):
    """The last stage compares each micro-batch's outputs with the targets of the next."""
    # The loss would refuse targets of other shapes.
    if len({tuple(each.targets.shape) for each in micro_batches}) == 1:
        following = (*micro_batches[1:], micro_batches[0])
        pairs = zip(micro_batches, following, strict=True)
        micro_batches = tuple(replace(each, targets=after.targets) for each, after in pairs)
    begin(loss, micro_batches, *more)


@FAULTS.add(
    "buffers of later micro-batches",
    "our own: a pipeline without a copy of buffers for each forward",
    PIPELINE2.with_("model={use: tests.proof.zoo.models.Scaling}"),
    "paddle_dp.axes.pipeline.runner:separate_buffers",
)
def later_buffers(separate, layers):
    """A backward reads the scale that a later micro-batch's forward has written."""
    from contextlib import nullcontext

    return nullcontext()


@FAULTS.add("blocks change places", "TTrace, wrong division into stages", PIPELINE2, STAGES)
def blocks_change_places(init, stages, blocks, bounds, *more):
    """Two blocks of the first stage run in the wrong order."""
    blocks, cut = list(blocks), bounds[1]
    blocks[cut - 2], blocks[cut - 1] = blocks[cut - 1], blocks[cut - 2]
    init(stages, blocks, bounds, *more)


@FAULTS.add(
    "block runs twice",
    "TTrace, wrong division into stages",
    PIPELINE2,
    STAGES,
    guard="door",
    where=("it was never given a value",),
)
def block_runs_twice(init, stages, blocks, bounds, *more):
    """The first stage runs one block twice and the next not at all."""
    blocks = list(blocks)
    blocks[bounds[1] - 1] = blocks[bounds[1] - 2]
    init(stages, blocks, bounds, *more)


@FAULTS.add(
    "local block numbers",
    "silent-fault catalogue, CKPT: keyed by local layer numbers",
    PIPELINE2,
    "paddle_dp.axes.pipeline.stages:LocalStages.state",
    guard="door",
    exam="rehearsal",
)
def stages_keyed_by_local_numbers(state, stages):
    """Each stage saves its blocks under numbers that begin at 0."""
    blocks = dict(stages.elements())
    first = min(blocks)
    return {
        f"blocks.{number - first}.{name}": tensor
        for number, block in blocks.items()
        for name, tensor in block.state_dict().items()
    }
