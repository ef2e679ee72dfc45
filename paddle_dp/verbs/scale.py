"""Tells what more ranks would give a recipe, from a machine's probe and a few measured steps."""

from __future__ import annotations

from collections.abc import Iterator

from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.part import adapted, lazily
from paddle_dp.plan.probe import Probe, ProductTiming, Timing
from paddle_dp.plan.transformer import Transformer, transformer
from paddle_dp.recipe import Recipe
from paddle_dp.text import amount, digits, duration, plural

MOST_TOKENS = 8192  # of a product's shape: more rows fill no kernel better


def sizes_of(recipe: Recipe) -> Transformer | str:
    """The sizes of the recipe's model if it is a transformer, else the reason."""
    with lazily():
        model, _ = adapted(recipe.model.build(), recipe.adapter, recipe.train.seed)
        blocks = describe_weights(model)
    length = getattr(recipe.dataset.config, "length", 0)
    return transformer(recipe.model.config, length if isinstance(length, int) else 0, blocks)


def product_shapes(recipe: Recipe) -> list[tuple[int, int, int]]:
    """[m, n, k] of the products of a block's layers and of the head, for one micro-batch of one rank; empty for a model
    that is no transformer, whose products are not known by arithmetic."""
    model = sizes_of(recipe)
    if isinstance(model, str):
        return []
    tokens = min(MOST_TOKENS, max(1, recipe.train.batch // recipe.train.micro_batches) * model.length)
    kv = model.kv_heads * model.width // model.heads
    shapes = [
        (tokens, model.width + 2 * kv, model.width), (tokens, model.width, model.width),
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
