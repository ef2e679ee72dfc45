"""Seconds of one training step in a layout, and where they go: kernels, links and the pipeline put together.

A pipeline of p stages, v virtual ones on each rank and m micro-batches takes m slots of its fullest stage and (p − 1)/v
slots to fill and to empty (Narayanan et al., arXiv:2104.04473; `pipeline_schedule.bubble`). Gradients are exchanged
after the last backward, or during it where the software overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.plan.devices import used_cards
from paddle_dp.plan.kernel_time import SHEET, BlockTimes, Rates, block_times
from paddle_dp.plan.workload import Numbers, Workload

# The terms of a step, as a person reads them: each name's keys in `StepTime.terms`.
SHARES = {
    "compute": ("products", "attention", "elementwise", "head", "host"), "tensor": ("tensor",),
    "sequence": ("sequence",), "norms": ("norms",), "bubble": ("bubble",), "stages": ("stages",),
    "gradients": ("data",), "update": ("update",), "rest": ("fixed",),
}  # fmt: skip
UPDATE_BYTES = 34  # a weight: AdamW reads and writes master, two moments, gradient and 16-bit weight


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part, [n] each, on the critical path: the terms add up to the step."""

    terms: dict[str, Numbers]

    @property
    def seconds(self) -> Numbers:
        """Seconds of the step, [n]."""
        return np.sum(list(self.terms.values()), axis=0)

    def shares(self, index: int) -> dict[str, float]:
        """The share of each of `SHARES` in the step at this index."""
        total = float(self.seconds[index])
        return {
            name: float(sum(self.terms[part][index] for part in terms if part in self.terms)) / total
            for name, terms in SHARES.items()
        }


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """The computation of the ranks of layouts, [n] each. Seconds are of one micro-batch.

    `slowest`: seconds of the slowest stage of the pipeline by kind, with the exchanges in its layers. `stage`: of a
    stage in the mean, without `tail`, which only the last one has. `weights`: on a rank of the fullest stage, before
    ZeRO; `update_products`: FLOPs of the products in their update, as many as the peak would do in the time.
    """

    slowest: dict[str, Numbers]
    stage: Numbers
    tail: Numbers
    weights: Numbers
    update_products: Numbers


def step_time(load: Workload, rates: Rates = SHEET) -> StepTime:
    """The forecast of each layout of the workload, by the constants `rates`."""
    block = block_times(load, rates)
    layer = _layer(load, block, rates)
    every_layer = np.sum(list(layer.values()), axis=0)
    head = block.head + 2 * tensor_seconds(load, rates)
    # The slowest of the stages sets the pace: the one with most blocks, or the last one with the head.
    fullest, last = load.full_depth * every_layer, load.last_depth * every_layer + head
    depth = np.where(last >= fullest, load.last_depth, load.full_depth)
    slowest = {name: depth * seconds for name, seconds in layer.items()}
    slowest["head"] = np.where(last >= fullest, head, 0.0)
    work = StageWork(
        slowest=slowest, stage=load.depth / load.pipeline * every_layer, tail=head, weights=rank_weights(load),
        update_products=load.full_depth * load.update_products,
    )  # fmt: skip
    return assembled(load, work, rates)


def assembled(load: Workload, work: StageWork, rates: Rates) -> StepTime:
    """The steps of ranks that compute so: with the pipeline's bubble, the exchanges between layers, and the update."""
    terms = {name: load.micros * seconds for name, seconds in work.slowest.items()}
    terms["bubble"] = (load.pipeline - 1) / load.virtual_stages * work.stage
    blocking = np.where(load.overlaps_stages == 1, 0.0, load.micros * load.virtual_stages)
    handovers = blocking + load.pipeline - 1
    terms["stages"] = 2 * handover_seconds(load, rates) * handovers
    all_work = load.micros * (work.stage + work.tail)
    terms["data"] = _exposed(load, work.weights, work.stage, all_work, rates)
    shards = np.where(load.stage > 0, np.maximum(load.sharded, 1.0), 1.0)
    terms["update"] = work.weights * UPDATE_BYTES / shards / (load.memory_rate * rates.memory)
    terms["update"] += work.update_products / shards / (load.peak * rates.gemm)
    terms["fixed"] = np.full(len(load), rates.fixed)
    return StepTime(terms=terms)


def rank_weights(load: Workload) -> Numbers:
    """Elements of the weights on a rank of the fullest stage, before ZeRO."""
    return (load.block_weights * load.full_depth + load.tables * load.vocab * load.width) / load.tensor


def _layer(load: Workload, block: BlockTimes, rates: Rates) -> dict[str, Numbers]:
    """Seconds of one block and one micro-batch: forward, backward and recomputation, with its exchanges. "host":
    the card waits for the process that launches its kernels."""
    tensor, sequence = 2 * tensor_seconds(load, rates), sequence_seconds(load, rates)
    layer = {
        name: block.forward[name] + block.backward[name] + block.recomputed[name] for name in block.forward
    }
    layer["tensor"] = (2 + load.recomputed_blocks) * tensor
    layer["sequence"] = (3 - load.ulysses + load.recomputed_blocks) * sequence
    forward = sum(block.forward.values()) + tensor + sequence
    backward = np.sum(list(layer.values()), axis=0) - forward
    host = rates.host
    layer["host"] = np.maximum(0.0, host - forward)
    layer["host"] += np.maximum(0.0, (2 + load.recomputed_blocks) * host - backward)
    return layer


def _exposed(
    load: Workload, weights: Numbers, last_backward: Numbers, all_work: Numbers, rates: Rates
) -> Numbers:
    """Seconds of the exchange of gradients that no computation hides: it runs during the last micro-batch, in stages 2
    and 3 during all of them."""
    exchange = gradient_seconds(load, weights, rates)
    every = load.stage >= 2
    # Stage 3 prefetches, and its last bucket is one layer's.
    hides = np.where(load.stage == 3, 1.0, rates.hides)
    hidden = np.where(every | (load.overlaps_data == 1), hides, 0.0) * exchange
    return exchange - np.minimum(hidden, np.where(every, all_work, last_backward))


# Links ----------------------------------------------------------------------------------------------------------------
# Seconds of a layout's exchanges, axis by axis: each over the links that its ranks have. Neighbouring ranks are on one
# tensor axis, then sequence, sharding, pipeline and data (`mesh.degrees.AXES`); Megatron has data within pipelines
# (`data_outside` is 0). An axis within a node has the cards' links; one across nodes shares the node's network cards
# with the axes next to it.


def ring_seconds(size: Numbers, ranks: Numbers, rate: Numbers, rates: Rates) -> Numbers:
    """Seconds of an all-reduce of `size` bytes on each of `ranks` at `rate` bytes/s: 2(n − 1)/n·size (Patarasuk and
    Yuan 2009), and the start of its two halves. A reduce-scatter or an all-gather is one half."""
    several = np.maximum(ranks, 1.0)
    seconds = 2 * (several - 1) / several * size / rate + 2 * rates.start * np.log2(several)
    return np.where(ranks > 1, seconds, 0.0)


def node_cards(load: Workload) -> Numbers:
    """The cards of a node that each layout uses."""
    pairs = zip(load.ranks, load.node, strict=True)
    return np.array([used_cards(round(ranks), round(node)) for ranks, node in pairs], float)


def in_a_node(neighbours: Numbers, load: Workload) -> Numbers:
    """The fewest of a group of neighbouring ranks that any node has of it: all of them, if their number divides its
    cards; of 3 on nodes of 8 the third group has 2 on one node and 1 on the next."""
    return np.gcd(neighbours.astype(int), node_cards(load).astype(int)).astype(float)


def ring_rate(local: Numbers, ranks: Numbers, load: Workload, rates: Rates) -> Numbers:
    """Bytes/s of a ring of `ranks` of which a node has `local`: of the cards' links, or of so many network cards."""
    inside = load.card_link * rates.card_link
    across = np.minimum(inside, load.node_link * rates.node_link * local / load.node)
    return np.where(local >= ranks, inside, across)


def tensor_seconds(load: Workload, rates: Rates) -> Numbers:
    """One all-reduce of a block's output of a micro-batch; with sequence_parallel its two halves, of the same bytes."""
    size = load.micro * load.length / load.sequence * load.width * load.number
    rate = ring_rate(in_a_node(load.tensor, load), load.tensor, load, rates)
    return ring_seconds(size, load.tensor, rate, rates)


def sequence_seconds(load: Workload, rates: Rates) -> Numbers:
    """One forward's exchange in a block's attention: all keys and values gathered, or, with `ulysses`, q, k, v and the
    output exchanged for heads (Jacobs et al., arXiv:2309.14509)."""
    n = load.sequence
    tokens = load.micro * load.length / n
    gathered = (n - 1) * tokens * 2 * load.keys / load.tensor * load.number
    exchanged = (n - 1) / n * tokens * (2 * load.queries + 2 * load.keys) / load.tensor * load.number
    share = np.minimum(load.node, load.tensor * n)  # cards of a node that use its network at the same time
    across = np.minimum(load.node_link * rates.node_link / share, load.card_link * rates.card_link)
    inside = (in_a_node(load.tensor * n, load) == load.tensor * n) & (load.ulysses == 1)
    rate = np.where(inside, load.card_link * rates.card_link, across)
    seconds = np.where(load.ulysses == 1, exchanged, gathered) / rate + load.ulysses * 4 * rates.start
    return np.where(n > 1, seconds, 0.0)


def handover_seconds(load: Workload, rates: Rates) -> Numbers:
    """One micro-batch's activations from a stage to the next: each tensor rank sends its share (scatter and gather,
    Narayanan et al., arXiv:2104.04473, section 4.1)."""
    size = load.micro * load.length / load.sequence * load.width * load.number / load.tensor
    across = load.node_link * rates.node_link / load.node
    stages = pipeline_ranks(load)
    rate = np.where(in_a_node(stages, load) == stages, load.card_link * rates.card_link, across)
    return np.where(load.pipeline > 1, size / rate + rates.start, 0.0)


def pipeline_ranks(load: Workload) -> Numbers:
    """The neighbouring ranks among which a pipeline's are: the product of all axes within it."""
    within = np.where(load.data_outside == 1, load.sequence * load.sharded, load.sequence * load.data)
    return load.tensor * within * load.pipeline


def data_rate(load: Workload, rates: Rates) -> Numbers:
    """Bytes/s of one rank's ring over data and sequence: as many rings share a node's network cards as it has ranks
    with other weights. A node has one part of the ring, or, of the data axis outside of pipelines, one in each of its
    pipelines."""
    ranks = load.data * load.sequence
    split = (load.data_outside == 1) & (load.pipeline > 1)
    part = np.where(split, load.sharded * load.sequence, ranks)
    local = np.maximum(1.0, in_a_node(part * load.tensor, load) / load.tensor)
    pipelines = node_cards(load) / pipeline_ranks(load)
    local *= np.where(split & (pipelines == np.floor(pipelines)), np.minimum(pipelines, ranks / part), 1.0)
    return ring_rate(local, ranks, load, rates)


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
