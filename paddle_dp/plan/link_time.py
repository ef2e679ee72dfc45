"""Seconds of a layout's exchanges, axis by axis: each over the links that its ranks have.

Neighbouring ranks are on one tensor axis, then sequence, sharding, pipeline and data (`mesh.degrees.AXES`). An axis
within a node has the cards' links; one across nodes shares the node's network cards with the axes next to it.
"""

from __future__ import annotations

import numpy as np

from paddle_dp.plan.kernel_time import Rates
from paddle_dp.plan.workload import Numbers, Workload


def ring_seconds(size: Numbers, ranks: Numbers, rate: Numbers, rates: Rates) -> Numbers:
    """Seconds of an all-reduce of `size` bytes on each of `ranks` at `rate` bytes/s: 2(n − 1)/n·size (Patarasuk and
    Yuan 2009), and the start of its two halves. A reduce-scatter or an all-gather is one half."""
    several = np.maximum(ranks, 1.0)
    seconds = 2 * (several - 1) / several * size / rate + 2 * rates.start * np.log2(several)
    return np.where(ranks > 1, seconds, 0.0)


def tensor_seconds(load: Workload, rates: Rates) -> Numbers:
    """One all-reduce of a block's output of a micro-batch; with sequence_parallel its two halves, of the same bytes."""
    size = load.micro * load.length / load.sequence * load.width * load.number
    across = np.minimum(load.node_link * rates.node_link, load.card_link * rates.card_link)
    rate = np.where(load.tensor <= load.node, load.card_link * rates.card_link, across)
    return ring_seconds(size, load.tensor, rate, rates)


def sequence_seconds(load: Workload, rates: Rates) -> Numbers:
    """One forward's exchange in a block's attention: all keys and values gathered, or, with `ulysses`, q, k, v and the
    output exchanged for heads (Jacobs et al., arXiv:2309.14509)."""
    n = load.sequence
    tokens = load.micro * load.length / n
    kv = load.kv_heads * load.width / load.heads
    gathered = (n - 1) * tokens * 2 * kv / load.tensor * load.number
    exchanged = (n - 1) / n * tokens * (2 * load.width + 2 * kv) / load.tensor * load.number
    share = np.minimum(load.node, load.tensor * n)  # cards of a node that use its network at the same time
    across = np.minimum(load.node_link * rates.node_link / share, load.card_link * rates.card_link)
    inside = (load.tensor * n <= load.node) & (load.ulysses == 1)
    rate = np.where(inside, load.card_link * rates.card_link, across)
    seconds = np.where(load.ulysses == 1, exchanged, gathered) / rate + load.ulysses * 4 * rates.start
    return np.where(n > 1, seconds, 0.0)


def handover_seconds(load: Workload, rates: Rates) -> Numbers:
    """One micro-batch's activations from a stage to the next: each tensor rank sends its share (scatter and gather,
    Narayanan et al., arXiv:2104.04473, section 4.1)."""
    size = load.micro * load.length / load.sequence * load.width * load.number / load.tensor
    across = load.node_link * rates.node_link / load.node
    rate = np.where(load.ranks <= load.node, load.card_link * rates.card_link, across)
    return np.where(load.pipeline > 1, size / rate + rates.start, 0.0)


def data_rate(load: Workload, rates: Rates) -> Numbers:
    """Bytes/s of one rank's ring over data and sequence: as many rings share a node's network cards as it has ranks
    with other weights."""
    ranks = load.data * load.sequence
    local = np.minimum(ranks, np.maximum(1.0, load.node / load.tensor))
    across = np.minimum(
        load.card_link * rates.card_link, load.node_link * rates.node_link * local / load.node
    )
    return np.where(ranks <= local, load.card_link * rates.card_link, across)


def gradient_seconds(load: Workload, weights: Numbers, rates: Rates) -> Numbers:
    """Seconds of all exchanges of gradients and ZeRO's parameters in a step, for `weights` elements on a rank.

    Without sharding or in stage 1: one ring, of which the second half carries sums or, sharded, new parameters. Stage 2
    sends the gradients of every micro-batch; stage 3 also fetches parameters in each forward and backward.
    """
    rate = data_rate(load, rates)
    shards = np.maximum(load.sharded, 1.0)
    replicas = load.data * load.sequence / shards
    gradients = ring_seconds(weights * load.gradient, load.data * load.sequence, rate, rates) / 2
    second = np.where(load.stage == 0, load.gradient, load.parameter)
    sums = ring_seconds(weights * second, load.data * load.sequence, rate, rates) / 2
    scattered = ring_seconds(weights * load.gradient, shards, rate, rates) / 2
    gathered = ring_seconds(weights * load.parameter, shards, rate, rates) / 2
    between = ring_seconds(weights / shards * load.gradient, replicas, rate, rates)
    stage2 = load.micros * scattered + gathered + between
    stage3 = load.micros * (scattered + (2 + load.recomputed_blocks) * gathered) + between
    return np.select([load.stage == 3, load.stage == 2], [stage3, stage2], gradients + sums)
