"""The lines of `paddle-dp check --ranks`: a rank's memory and traffic, without starting the job; `--build` builds a
rank's layers.

The screen shows bytes and seconds in three digits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from typing import Any

from paddle_dp.axes.meta_init import built, describe_weights
from paddle_dp.core.parameter_groups import describe_groups
from paddle_dp.data.arrays import describe
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import read_sample
from paddle_dp.errors import DataError, PaddleDPError, UsageError
from paddle_dp.part.groups import turns_of
from paddle_dp.plan.bound import Wire, bound
from paddle_dp.plan.exchange import sent
from paddle_dp.plan.layout import Blocks, Layout, RankMemory, rank_memories, total_parameters
from paddle_dp.plan.transformer import Transformer
from paddle_dp.recipe import Recipe
from paddle_dp.text import amount, duration, plural
from paddle_dp.train.meter import peak_memory
from paddle_dp.verbs.forecast import (
    activation_bytes,
    activation_format,
    activations,
    between,
    grouped_model,
    layout_of,
    order_of,
    sizes_of,
)
from paddle_dp.verbs.traced_recipe import training_data, weightless


def forecast(recipe: Recipe, ranks: int, rank: int | None = None, wire: Wire | None = None) -> Iterator[str]:
    """Yields lines for the screen: the layout, the whole model, one rank's part, its traffic and, over a `wire`, the
    time for it. The rank is `rank`, with its layers built, too, or the one with the most memory; if ranks have roles,
    one of each role has lines. Raises UsageError for a layout that cannot run, PaddleDPError if the built layers
    have another number of parameters than computed.
    """
    layout = layout_of(recipe, ranks)
    if recipe.train.device == "auto" and not layout.accelerator:
        yield "this strategy is for CPUs only: train.device=auto must find no accelerator"
    dataset = yield from _first_sample(recipe)
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"--build {rank}: give a rank from 0 to {ranks - 1}.")
    with weightless(recipe):
        model = grouped_model(recipe)
        remarks = recipe.optimizer.prepare(model)
        turns = {name: turn.match for name, turn in recipe.turns.items()}
        remarks += [
            f"turn {name}, every {recipe.turns[name].every}: {plural(len(trained), 'parameter')}, "
            f"{sum(int(parameter.size) for parameter in trained):,} numbers, "
            f"{(recipe.turns[name].optimizer or recipe.optimizer).name}"
            for name, trained in (turns_of(turns, model) if turns else {}).items()
        ]
        blocks: Blocks = describe_weights(model)
    if recipe.optimizer.groups or recipe.adapter:
        yield from describe_groups(model, recipe.optimizer.groups)
    yield from remarks
    try:
        layout, blocks = recipe.strategy.config.assigned(
            recipe, layout, blocks, activation_bytes(recipe, layout)
        )
    except DataError as error:
        yield f"all branches are counted for each rank: samples show where each goes, and there are none: {error}"
    yield f"{plural(ranks, 'rank')}: {layout}; the whole model: {total_parameters(blocks):,} parameters"
    memories = rank_memories(blocks, layout) if rank is None else [layout.memory(blocks, rank)]
    model = sizes_of(recipe, blocks, dataset)
    activations_on = partial(activations, recipe, model, layout, blocks)
    is_flash = isinstance(model, Transformer) and activation_format(recipe, layout).flash
    estimate = f"activations (estimate{', flash attention' if is_flash else ''})"
    shown = max(memories, key=lambda m: m.total + (activations_on(m) or 0.0))
    for memory in [each for each in memories if layout.degrees.role(each.rank)] or [shown]:
        yield from _described(recipe, layout, len(blocks), memory, {estimate: activations_on(memory)})
    if traffic := recipe.strategy.config.traffic(layout, blocks, wire):
        yield from traffic
    elif ranks > 1:
        yield from _exchange(recipe, layout, blocks, shown.rank, wire)
    if layout.accelerator and recipe.train.device == "auto" and recipe.train.precision.is_low:
        yield "that is for accelerators: CPUs emulate low precision in float32; train.device=cpu plans for them"
    if rank is not None and layout.degrees.reads(rank):  # else it runs no layer
        yield _built(recipe, layout, shown)


def summed(sizes: Mapping[str, float]) -> str:
    """ "weights 128 MB, gradients 128 MB: 256 MB in all"."""
    terms = ", ".join(f"{name} {amount(size)}" for name, size in sizes.items())
    return f"{terms}: {amount(sum(sizes.values()))} in all"


def _first_sample(recipe: Recipe) -> Generator[str, None, Any]:
    """Yields a line on the first sample as the model gets it, if samples are padded, and returns the data set then.
    Raises UsageError if loader.pad names inputs that the sample does not have."""
    if not recipe.loader.pad:
        return None
    try:
        with restoring_globals():
            dataset = training_data(recipe)
            inputs, targets = read_sample(dataset, 0)
    except DataError as error:
        yield f"loader.pad: not compared with the data, which cannot be read here: {error}"
        return None
    yield f"the first sample, padded: {describe(inputs)}, target {describe(targets)}"
    return dataset


def _described(
    recipe: Recipe, layout: Layout, blocks: int, memory: RankMemory, forward: Mapping[str, float | None]
) -> Iterator[str]:
    """Yields lines on a rank of a model with so many blocks; `forward`: the bytes that its forward keeps, if known."""
    coords = ", ".join(f"{layout.called(axis)} {memory.coords[axis]}" for axis in layout.degrees.split_axes)
    coords = layout.degrees.role(memory.rank) or coords
    stored, held = memory.state.parameters / layout.widths.parameter, "holds"
    if layout.sharding_stage == 3 and layout.degrees.sharding > 1:  # each parameter has one owner
        held = f"stores 1/{round(memory.parameters / stored)} of" if stored else "stores none of"
    rank = f"rank {memory.rank}{f' ({coords})' if coords else ''} {held} {memory.parameters:,} parameters"
    yield f"{rank}: blocks {_runs(memory.stages)} of {blocks}" if blocks > 1 else rank
    sizes = _sizes(recipe, layout, memory, forward)
    yield layout.state_label + summed(sizes)
    if layout.devices > 1:
        yield from _further_devices(layout.devices - 1, sizes)


def _sizes(
    recipe: Recipe, layout: Layout, memory: RankMemory, forward: Mapping[str, float | None]
) -> dict[str, float]:
    """The bytes that the rank holds, by name; `forward`: those that its forward keeps, if known."""
    state = memory.state
    kept = "optimizer" if recipe.ema is None else "optimizer and averages"
    sizes = {"weights": state.parameters, "gradients": state.gradients, kept: state.optimizer}
    if memory.extra:
        sizes[layout.extra_label] = memory.extra
    if memory.transient:
        sizes[layout.transient_label] = memory.transient
    return sizes | {name: size for name, size in forward.items() if size is not None}


def _further_devices(count: int, sizes: dict[str, float]) -> Iterator[str]:
    """Yields lines on the `count` devices of a process with replicas after the first, which holds `sizes`."""
    copied = {name: size for name, size in sizes.items() if not name.startswith("optimizer")}
    yield f"{count} further device{'s: each' if count > 1 else ':'} {summed(copied)}"
    weights, gradients = (amount(count * sizes[name]) for name in ("weights", "gradients"))
    yield f"a step copies {weights} of weights there, and {gradients} of gradients back"


def _exchange(recipe: Recipe, layout: Layout, blocks: Blocks, rank: int, wire: Wire | None) -> Iterator[str]:
    """Yields lines on the rank's traffic in a step; over a wire also its time, and the shortest step."""
    transfers = sent(blocks, layout, rank, recipe.train.micro_batches, between(recipe, layout))
    total = sum(each.bytes for each in transfers)
    sizes: defaultdict[tuple[str, str], float] = defaultdict(float)
    for each in transfers:
        sizes[each.axis, each.payload] += each.bytes
    summary = ", ".join(f"{axis} {amount(size)} of {payload}" for (axis, payload), size in sizes.items())
    degrees, activations = layout.degrees, any(each.payload == "activations" for each in transfers)
    unknown = max(degrees.tensor, degrees.sequence, degrees.pipeline) > 1 and not activations
    left_out = " (activations are counted for transformers only)" if unknown else ""
    if summary or not unknown:
        yield f"a step sends {amount(total)}: {summary}{left_out}" if summary else "a step sends nothing"
    else:
        yield "a step sends activations, which are counted for transformers only"
    if wire is None:
        return
    speed = wire.link.bytes_per_second
    alone = f"over {wire.link} that takes {duration(total / speed)}"
    if wire.compute is None:
        yield alone
        return
    compute, order = wire.compute, order_of(layout, recipe.train.micro_batches)
    best, worst = (duration(bound(compute, transfers, speed, order, overlap)) for overlap in (True, False))
    yield (
        f"{alone}: a step that computes for {duration(compute.total)} lasts {best} at least, and {worst} where "
        "nothing is sent meanwhile"
    )


def _runs(stages: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in stages)


def _built(recipe: Recipe, layout: Layout, memory: RankMemory) -> str:
    """Builds that rank's layers on the CPU. Raises PaddleDPError unless their number of parameters is as computed."""
    import paddle

    paddle.set_device("cpu")
    tensor, size = memory.coords["tensor"], layout.degrees.tensor
    layers = recipe.strategy.config.rank_layers(recipe, memory)
    if layers is None:
        layers = built(recipe.build_model, memory.blocks, tensor, size, recipe.train.seed)
    parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
    count = sum(int(p.size) for p in parameters)
    size = sum(int(p.size) * p.element_size() for p in parameters)
    if count != memory.parameters:
        raise PaddleDPError(
            f"rank {memory.rank} was built with {count:,} parameters, but {memory.parameters:,} were computed: the "
            f"`cuts` and `blocks` of {recipe.model.name} do not describe all of its layers."
        )
    return (
        f"built: {count:,} parameters, as planned, {amount(size)} in float32; "
        f"peak memory of this process {amount(peak_memory('cpu'))}"
    )
