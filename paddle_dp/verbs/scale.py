"""Foretells the gain of more ranks for a recipe, from a machine's probe and a few measured steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paddle_dp.errors import PaddleDPError
from paddle_dp.plan.fullest_rank import USABLE_MEMORY
from paddle_dp.plan.layout import rank_memories
from paddle_dp.plan.probe import Probe, ProductTiming, Timing
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.recipe import Recipe
from paddle_dp.text import amount, digits, duration, plural
from paddle_dp.verbs.forecast import activations, blocks_of, layout_of, sizes_of

TRIED_RANKS = (*range(1, 17), 32, 64, 128, 256, 512, 1024)
PRODUCTS = 5  # shapes that a probe times of a model that is traced
MOST_TOKENS = 8192  # of a product's shape: more rows fill no kernel better


def fits_from(recipe: Recipe, limit: float, on: Callable[[int], Recipe]) -> Iterator[str]:
    """Yields a line on the smallest number of ranks on which the recipe's own layout fits into `limit` bytes of each
    rank, of those up to 16 and then of 32, 64 … 1024. `on`: the recipe on so many, whose batch may be `32 per rank`."""
    blocks, allowed = blocks_of(recipe), USABLE_MEMORY * limit
    within = f"{amount(allowed)} ({USABLE_MEMORY:.0%} of {amount(limit)})"
    sizes: dict[int, float] = {}
    model, is_complete, reason = sizes_of(recipe, blocks), True, "it has none"
    for ranks in TRIED_RANKS:
        try:
            recipe = on(ranks)
            layout = layout_of(recipe, ranks)
            layout, local = recipe.strategy.config.assigned(recipe, layout, blocks, 4)
        except PaddleDPError as error:
            reason = str(error)
            continue
        rows = [
            (each.total, activations(recipe, model, layout, local, each))
            for each in rank_memories(local, layout)
        ]
        sizes[ranks] = max(total + (forward or 0.0) for total, forward in rows)
        is_complete = any(forward is not None for _, forward in rows)
        if sizes[ranks] <= allowed:
            break
    without = "" if is_complete else ", activations left out (of this model and layout they are not known)"
    if not sizes:
        yield f"--memory: no number of ranks up to {TRIED_RANKS[-1]} has this layout: {reason}"
        return
    ranks, need = [*sizes.items()][-1]
    if need <= allowed:
        fewer = [*sizes.items()][-2:-1]
        more = f"; on {plural(fewer[0][0], 'rank')} it has {amount(fewer[0][1])}" if fewer else ""
        yield f"fits into {within} from {plural(ranks, 'rank')} on: the fullest has {amount(need)}{more}{without}"
        return
    ranks, need = min(sizes.items(), key=lambda pair: pair[1])
    yield (
        f"does not fit into {within} on any number of ranks up to {TRIED_RANKS[-1]}: {amount(need)} on "
        f"{ranks}{without}. More train.micro_batches or strategy.recompute=full keep less, strategy.sharding splits "
        "the states; `paddle-dp plan RECIPE --ranks N` has every layout."
    )


def product_shapes(recipe: Recipe) -> list[tuple[int, int, int]]:
    """[m, n, k] of the largest products of a model's forward, of a transformer the products of a block and of the
    head, for one micro-batch of one rank; empty if they are not known."""
    model = sizes_of(recipe, blocks_of(recipe))
    samples = max(1, recipe.train.batch // recipe.train.micro_batches)
    if model is None:
        return []
    if isinstance(model, TracedModel):
        by_flops = sorted(model.operators, key=lambda operator: -operator.flops)
        sides = [operator.product for operator in by_flops if operator.product]
        largest = {(min(MOST_TOKENS, round(samples * m)), round(n), round(k)): None for m, n, k in sides}
        return [*largest][:PRODUCTS]
    tokens = min(MOST_TOKENS, samples * model.length)
    queries, keys = (number * model.head_width for number in (model.heads, model.kv_heads))
    shapes = [
        (tokens, queries + 2 * keys, model.width), (tokens, model.width, queries),
        (tokens, (model.matrices - 1) * model.hidden, model.width), (tokens, model.width, model.hidden),
        (tokens, max(1, round(model.vocab)), model.width),
    ]  # fmt: skip
    return list(dict.fromkeys(shapes))


def probe_lines(probe: Probe) -> Iterator[str]:
    """Yields the probe as lines: each number with the fastest and the slowest of its rounds."""
    threads = f", {plural(probe.threads, 'thread')} each" if probe.threads else ""
    yield f"{probe.name}: {plural(probe.ranks, 'rank')}{threads}, {probe.dtype}, by {probe.library}"
    for busy in sorted({each.busy for each in probe.products}):
        yield f"{plural(busy, 'rank')} computing, for each of them:"
        for product in (each for each in probe.products if each.busy == busy):
            yield f"  {_called(product):28s} {product.rate / 1e9:8.3g} GFLOP/s  {_spread(product)}"
        for kernel in (each for each in probe.kernels if each.busy == busy):
            rate = "" if kernel.operation == "tiny" else f"{kernel.rate / 1e9:8.3g} GB/s"
            yield f"  {kernel.operation:28s} {rate:16s}  {_spread(kernel)}"
    for each in probe.collectives:
        yield f"{each.operation:14s} of {amount(each.bytes):>8s}     {each.rate / 1e9:8.3g} GB/s     {_spread(each)}"
    if not probe.collectives:
        yield "no collectives: they need 2 ranks"


def _called(product: ProductTiming) -> str:
    shape = f"{product.m} × {product.n} × {product.k}"
    return f"{shape} ({product.transpose}ᵀ)" if product.transpose else shape


def _spread(timing: Timing) -> str:
    return f"{duration(timing.seconds)} ({digits(1e3 * timing.low)} … {digits(1e3 * timing.high)} ms)"
