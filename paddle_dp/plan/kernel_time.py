"""Seconds of a transformer block's kernels on one card: products, attention, and kernels that only move bytes.

A product of [M, K] and [K, N] takes its FLOPs at a share of the peak that falls with short sides, or its bytes at a
share of the memory's rate, whichever is longer (the roofline, Williams et al. 2009). Nothing here is fitted to a run:
`Rates` has round numbers of public measurements, each with its source, and tools/planner_exam.py holds their forecasts
against published runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from paddle_dp.plan.workload import Numbers, Workload


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Constants of the forecast: shares of data sheets' rates, and seconds."""

    gemm: float = 0.80
    """Share of the peak in a large product: cuBLAS reaches 250 of A100's 312 TFLOP/s, and NVIDIA's matrix
    multiplication guide shows the same plateau."""

    side: float = 64.0
    """A side at which a product reaches half of that, n / (n + side): half a tile of 128 (the same guide)."""

    memory: float = 0.80
    """Share of the memory's rate: BabelStream's copy on A100 and V100 is 80 to 90 %."""

    activation: float = 1.0
    """The share of that rate that an MLP's activation function keeps: all, where arithmetic is faster than memory."""

    softmax: float = 1.0
    """The same for the softmax and the dropout of scores."""

    gap: float = 4e-6
    """Seconds between two kernels, with the ragged end of the first: a launch takes 2 to 5 µs."""

    host: float = 1.0e-3
    """Seconds in which one Python process launches a block's forward: some 50 operators (`HOST_OPERATORS`) of 20 µs."""

    card_link: float = 0.75
    """Share of the rate between a node's cards that a ring carries: nccl-tests show 230 of 300 GB/s (A100)."""

    node_link: float = 0.75
    """Share of the rate of a node's network cards: nccl-tests on several nodes show 70 to 90 %."""

    start: float = 20e-6
    """Seconds until a ring's exchange has begun, for each doubling of its ranks: nccl-tests with small messages."""

    hides: float = 0.9
    """Share of the gradients' exchange that runs during backward, where the software overlaps: the last bucket's cannot
    (Li et al., arXiv:2006.15704, section 3.2.3)."""

    fixed: float = 10e-3
    """Other seconds of a step: reading, clipping, logging, waiting for the slowest rank."""


SHEET = Rates()  # the defaults, as data sheets and public measurements say: no run has changed them
HOST_OPERATORS = 50  # in `Rates.host`
LOSS_BYTES = 26  # that softmax, loss and its gradient move for each logit, in float32
FP8_PEAK = 1.7  # times the 16-bit peak: products are twice as fast, but scaling and casts are added
FLASH_SHARE = 0.6  # of a product's rate: FlashAttention-2 reaches 50 to 73 % of the peak (arXiv:2307.08691)
FLASH_BACKWARD = 2.5  # forwards: five products against two (the same paper)

Kernels = Mapping[str, Numbers]  # seconds of one block and micro-batch, by kind
Sides = TypeVar("Sides", float, Numbers)


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of one block and one micro-batch by kind of kernel, and of the head."""

    forward: Kernels
    backward: Kernels
    recomputed: Kernels  # recomputed in backward
    head: Numbers  # both directions: products, softmax and loss


def block_times(load: Workload, rates: Rates) -> BlockTimes:
    """Kernels of one block: kinds "products", "attention" and "elementwise"."""
    tokens = load.micro * load.length / load.sequence
    fast = replace(load, peak=load.peak * (1 + (FP8_PEAK - 1) * load.fp8))  # attention stays in 16 bits
    gemm_forward, gemm_backward = _linear_layers(fast, rates, tokens)
    attention_forward, attention_backward = _attention(load, rates)
    elementwise, scores = _elementwise(load, rates, tokens)
    dense_scores = load.recomputed_scores * (1 - load.flash)  # flash attention recomputes them anyway
    # Every other product: all between.
    recomputed_elementwise = np.maximum(load.recomputed_blocks, 2 * load.recomputed_products)
    return BlockTimes(
        forward={"products": gemm_forward, "attention": attention_forward, "elementwise": elementwise},
        backward={"products": gemm_backward, "attention": attention_backward, "elementwise": 2 * elementwise},
        recomputed={
            "products": (load.recomputed_blocks + load.recomputed_products) * gemm_forward,
            "attention": np.maximum(load.recomputed_blocks, dense_scores) * attention_forward,
            "elementwise": recomputed_elementwise * elementwise + dense_scores * scores,
        },
        head=_head(fast, rates, tokens),
    )


def filled(m: Sides, n: Sides, k: Sides, side: float) -> Sides:
    """The share of a product's rate that its sides leave: each a half at `side`."""
    return m / (m + side) * n / (n + side) * k / (k + side)


def product_seconds(
    m: Numbers, n: Numbers, k: Numbers, load: Workload, rates: Rates, count: Numbers | float = 1.0
) -> Numbers:
    """Seconds of `count` products of [m, k] and [k, n] in one launch."""
    arithmetic = 2 * m * n * k / (load.peak * rates.gemm * filled(m, n, k, rates.side))
    traffic = load.number * (m * n + n * k + m * k) / (load.memory_rate * rates.memory)
    return count * np.maximum(arithmetic, traffic) + rates.gap


def _both_ways(m: Numbers, n: Numbers, k: Numbers, load: Workload, rates: Rates) -> tuple[Numbers, Numbers]:
    """Forward, and backward's two products: for the input and for the weight."""
    forward = product_seconds(m, n, k, load, rates)
    return forward, product_seconds(m, k, n, load, rates) + product_seconds(k, n, m, load, rates)


def _linear_layers(load: Workload, rates: Rates, tokens: Numbers) -> tuple[Numbers, Numbers]:
    """The four linear layers of a block: q with k and v, the output, into the MLP and out of it."""
    width, t = load.width, load.tensor
    shapes = (
        ((load.queries + 2 * load.keys) / t, width),
        (width, load.queries / t),
        ((load.matrices - 1) * load.hidden / t, width),
        (width, load.hidden / t),
    )
    seconds = [_both_ways(tokens, n, k, load, rates) for n, k in shapes]
    casts = load.cast * load.block_weights / t / (load.memory_rate * rates.memory)
    forward = sum((one for one, _ in seconds), start=casts)
    return forward, sum((one for _, one in seconds), start=casts)


def _attention(load: Workload, rates: Rates) -> tuple[Numbers, Numbers]:
    """Scores, and their products with the values: of whole squares, or of the causal half by flash attention, which
    skips no tile where a mask of documents is read."""
    heads = load.heads / load.tensor
    rows = np.where(load.ulysses == 1, load.length, load.length / load.sequence)
    count = load.micro * np.where(load.ulysses == 1, heads / load.sequence, heads)
    dense = 2 * product_seconds(rows, load.length, load.head_width, load, rates, count)
    causal = 2 * rows * load.length * load.head_width * count  # FLOPs of half of both products
    flash = (1 + load.masked) * causal / (load.peak * rates.gemm * FLASH_SHARE) + rates.gap
    return (
        np.where(load.flash == 1, flash, dense),
        np.where(load.flash == 1, FLASH_BACKWARD * flash, 2 * dense),
    )


def _elementwise(load: Workload, rates: Rates, tokens: Numbers) -> tuple[Numbers, Numbers]:
    """Kernels that only move bytes, in forward; and the share of the scores: softmax and dropout.

    In 16 bits a token moves 22 bytes a number of its width for norms, dropout and residuals, 28 a number of q for
    copies of q, k, v and attention's output, 4 a number inside the MLP (read and written); a score moves 9: written,
    read and written by the softmax and by its dropout, with a mask of one byte.
    """
    width, t, narrow = load.width, load.tensor, load.number / 2
    along = np.where(load.sequence_parallel == 1, t, 1.0)
    between = tokens * width * 22 / along + tokens * load.queries * 28 / t
    inside = tokens * load.hidden * (load.matrices - 1) * 4 / t
    square = load.micro * load.heads / t * load.length * load.length / load.sequence
    rate = load.memory_rate * rates.memory
    scores = np.where(load.flash == 1, 0.0, 9 * square) * narrow / (rate * rates.softmax)
    return (between + inside / rates.activation) * narrow / rate + scores + 10 * rates.gap, scores


def _head(load: Workload, rates: Rates, tokens: Numbers) -> Numbers:
    """The last product, and softmax, loss and its gradient in float32."""
    share = load.vocab / load.tensor
    forward, backward = _both_ways(tokens, share, load.width, load, rates)
    return forward + backward + tokens * share * LOSS_BYTES / (load.memory_rate * rates.memory)
