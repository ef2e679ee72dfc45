"""The memory that a rank of a job would need, computed without starting it; `check --build` builds a rank's layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.parallel.meta_init import built, describe_weights
from paddle_dp.part import lazily
from paddle_dp.plan.activations import Tokens, activation_bytes, in_flight
from paddle_dp.plan.memory import STATES, Widths
from paddle_dp.plan.rank_memory import (
    Blocks,
    Layout,
    RankMemory,
    rank_memories,
    rank_memory,
    total_parameters,
)
from paddle_dp.recipe import Recipe
from paddle_dp.train.meter import peak_memory

GB = 1e9


def forecast(recipe: Recipe, ranks: int, rank: int | None = None) -> Iterator[str]:
    """Lines for the screen: the layout, the whole model, and the part of one rank: of `rank`, whose layers are then
    built, or of the rank with the most. Raises UsageError for a layout that cannot run, PaddleDPError if the layers
    built have another number of parameters than computed.
    """
    layout = layout_of(recipe, ranks)
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"--build {rank}: give a rank from 0 to {ranks - 1}.")
    with lazily():
        blocks = describe_weights(recipe.model.build())
    yield f"{ranks} rank{'s' * (ranks > 1)}: {layout.degrees}; the whole model: {total_parameters(blocks):,} parameters"
    if rank is None:
        memories = rank_memories(blocks, layout)
        shown = max(memories, key=lambda m: m.state.total + (activations(recipe, layout, blocks, m) or 0.0))
    else:
        shown = rank_memory(blocks, layout, rank)
    yield from _described(recipe, layout, blocks, shown)
    if rank is not None:
        yield _built(recipe, layout, shown)


def layout_of(recipe: Recipe, ranks: int) -> Layout:
    """The layout of the recipe's strategy on `ranks` ranks. Raises UsageError if it cannot run."""
    precision = recipe.train.precision
    for part in (recipe.strategy, *recipe.callbacks):
        part.refuse(recipe, ranks, "cpu" if recipe.train.device == "cpu" else "gpu")
    widths = Widths.of(
        recipe.optimizer.name if recipe.optimizer.name in STATES else "adamw",
        low=precision.level == "O2" and precision.dtype in ("bfloat16", "float16"),
        double=precision.dtype == "float64",
    )
    layout: Layout = recipe.strategy.config.layout(ranks)
    return replace(layout, widths=widths)


def _described(recipe: Recipe, layout: Layout, blocks: Blocks, memory: RankMemory) -> Iterator[str]:
    coords = ", ".join(f"{axis} {coord}" for axis, coord in memory.coords.items() if layout.degrees[axis] > 1)
    rank = f"rank {memory.rank}{f' ({coords})' if coords else ''} holds {memory.parameters:,} parameters"
    yield f"{rank}: blocks {_runs(memory.stages)} of {len(blocks)}" if len(blocks) > 1 else rank
    sizes = {
        "weights": memory.state.parameters,
        "gradients": memory.state.gradients,
        "optimizer": memory.state.optimizer,
    }
    forward = activations(recipe, layout, blocks, memory)
    if forward is not None:
        sizes["activations (estimate)"] = forward
    parts = ", ".join(f"{name} {size / GB:.3g} GB" for name, size in sizes.items())
    yield f"{parts}: {sum(sizes.values()) / GB:.3g} GB in all"


def _runs(stages: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in stages)


@runtime_checkable
class TransformerSizes(Protocol):
    """The settings of a model for which activations can be estimated."""

    width: int
    heads: int
    depth: int
    length: int
    vocab: int


def activations(recipe: Recipe, layout: Layout, blocks: Blocks, memory: RankMemory) -> float | None:
    """Bytes of activations on the rank, as `plan.activations` estimates them; None unless it is a transformer."""
    model, degrees = recipe.model.config, layout.degrees
    if not isinstance(model, TransformerSizes):
        return None
    samples = -(-recipe.train.batch // (recipe.train.micro_batches * degrees.dp_size))
    tokens = Tokens(
        length=model.length // degrees.sequence, samples=samples, width=model.width, heads=model.heads,
        vocab=model.vocab, tensor=degrees.tensor, sequence_parallel=layout.sequence_parallel,
        bytes={"float64": 8, "float32": 4}.get(recipe.train.precision.dtype, 2),
    )  # fmt: skip
    micro_batches = in_flight(
        layout.pipeline_schedule,
        degrees.pipeline,
        memory.coords["pipeline"],
        recipe.train.micro_batches,
        layout.virtual_stages,
    )
    return activation_bytes(tokens, memory.stages, len(blocks), layout.recompute, micro_batches)


def _built(recipe: Recipe, layout: Layout, memory: RankMemory) -> str:
    """Builds that rank's layers on the CPU. Raises PaddleDPError unless they have the parameters that were computed."""
    import paddle

    paddle.set_device("cpu")
    layers = built(recipe.model.build, memory.blocks, memory.coords["tensor"], layout.degrees.tensor)
    parameters = {id(p): p for layer in layers for p in layer.parameters()}.values()
    count = sum(int(p.size) for p in parameters)
    size = sum(int(p.size) * p.element_size() for p in parameters)
    if count != memory.parameters:
        raise PaddleDPError(
            f"rank {memory.rank} was built with {count:,} parameters, but {memory.parameters:,} were computed: the "
            f"`cuts` and `blocks` of {recipe.model.name} do not describe all of its layers."
        )
    return (
        f"built: {count:,} parameters, as planned, {size / GB:.3g} GB in float32; "
        f"peak memory of this process {peak_memory('cpu') / GB:.3g} GB"
    )
