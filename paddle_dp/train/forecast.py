"""What each rank of a job would hold, before there is a job: worked out, and for one rank built, to see it is true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.parallel.meta_init import built, describe_weights
from paddle_dp.part import lazily
from paddle_dp.plan.activations import Tokens, kept, waiting
from paddle_dp.plan.memory import STATES, Widths
from paddle_dp.plan.rank_memory import Blocks, Layout, RankMemory, rank_memories, rank_memory, whole
from paddle_dp.recipe import Recipe
from paddle_dp.train.meter import memory

GB = 1e9


def forecast(recipe: Recipe, ranks: int, rank: int | None = None) -> Iterator[str]:
    """Lines for the screen: the layout, the whole model, and one rank's part: `rank`'s, which is then built, or the
    fullest's. Raises UsageError for a layout that cannot run, PaddleDPError if what is built is not what was planned.
    """
    layout = layout_of(recipe, ranks)
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"--build {rank}: {ranks} ranks are numbered from 0 to {ranks - 1}.")
    with lazily():
        blocks = describe_weights(recipe.model.build())
    yield f"{ranks} rank{'s' * (ranks > 1)}: {layout.degrees}; the whole model: {whole(blocks):,} parameters"
    if rank is None:
        everyone = rank_memories(blocks, layout)
        mine = max(everyone, key=lambda p: p.state.total + (activations(recipe, layout, blocks, p) or 0.0))
    else:
        mine = rank_memory(blocks, layout, rank)
    yield from _described(recipe, layout, blocks, mine)
    if rank is not None:
        yield _built(recipe, layout, mine)


def layout_of(recipe: Recipe, ranks: int) -> Layout:
    """The layout of the recipe's strategy on so many ranks. Raises UsageError where it cannot run."""
    precision = recipe.train.precision
    recipe.strategy.refuse(recipe, ranks, "cpu" if recipe.train.device == "cpu" else "gpu")
    widths = Widths.of(
        recipe.optimizer.name if recipe.optimizer.name in STATES else "adamw",
        low=precision.level == "O2" and precision.dtype in ("bfloat16", "float16"),
        double=precision.dtype == "float64",
    )
    layout: Layout = recipe.strategy.config.layout(ranks)
    return replace(layout, widths=widths)


def _described(recipe: Recipe, layout: Layout, blocks: Blocks, mine: RankMemory) -> Iterator[str]:
    coords = ", ".join(f"{axis} {place}" for axis, place in mine.coords.items() if layout.degrees[axis] > 1)
    holds = f"rank {mine.rank}{f' ({coords})' if coords else ''} holds {mine.parameters:,} parameters"
    several = len(blocks) > 1
    yield f"{holds} of {_runs(mine.stages)} of {len(blocks)} blocks" if several else holds
    found = {
        "weights": mine.state.parameters,
        "gradients": mine.state.gradients,
        "optimizer": mine.state.optimizer,
    }
    forward = activations(recipe, layout, blocks, mine)
    if forward is not None:
        found["activations (estimate)"] = forward
    parts = ", ".join(f"{name} {size / GB:.3g} GB" for name, size in found.items())
    yield f"{parts}: {sum(found.values()) / GB:.3g} GB in all"


def _runs(stages: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in stages)


def activations(recipe: Recipe, layout: Layout, blocks: Blocks, mine: RankMemory) -> float | None:
    """Bytes of activations on this rank, as `plan.activations` estimates them; None for what is no transformer."""
    model, degrees = recipe.model.config, layout.degrees
    if not all(hasattr(model, name) for name in ("width", "heads", "depth", "length", "vocab")):
        return None
    samples = -(-recipe.train.batch // (recipe.train.micro_batches * degrees.dp_size))
    tokens = Tokens(
        length=model.length // degrees.sequence, samples=samples, width=model.width, heads=model.heads,
        vocab=model.vocab, tensor=degrees.tensor, sequence_parallel=layout.sequence_parallel,
        bytes={"float64": 8, "float32": 4}.get(recipe.train.precision.dtype, 2),
    )  # fmt: skip
    micro_batches = waiting(
        layout.pipeline_schedule,
        degrees.pipeline,
        mine.coords["pipeline"],
        recipe.train.micro_batches,
        layout.virtual_stages,
    )
    return kept(tokens, mine.stages, len(blocks), layout.recompute, micro_batches)


def _built(recipe: Recipe, layout: Layout, mine: RankMemory) -> str:
    """Builds that rank's part on this machine's processor. Raises PaddleDPError unless it is what was planned."""
    import paddle

    paddle.set_device("cpu")
    layers = built(recipe.model.build, mine.blocks, mine.coords["tensor"], layout.degrees.tensor)
    found = {id(parameter): parameter for layer in layers for parameter in layer.parameters()}.values()
    count, size = sum(int(p.size) for p in found), sum(int(p.size) * p.element_size() for p in found)
    if count != mine.parameters:
        raise PaddleDPError(
            f"rank {mine.rank} was built with {count:,} parameters, and planned with {mine.parameters:,}: "
            f"the plan does not know what {recipe.model.name}'s tables cut."
        )
    return (
        f"built: {count:,} parameters, as planned, {size / GB:.3g} GB in float32; "
        f"this process held {memory('cpu') / GB:.3g} GB at most"
    )
