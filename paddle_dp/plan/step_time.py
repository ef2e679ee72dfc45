"""Seconds of one training step in a layout, and where they go: kernels, links and the pipeline put together.

A pipeline of p stages, v virtual ones on each rank and m micro-batches takes m slots of its fullest stage and (p − 1)/v
slots to fill and to empty (Narayanan et al., arXiv:2104.04473; `pipeline_schedule.bubble`). Gradients are exchanged
after the last backward, or during it where the software overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.plan.kernel_time import SHEET, BlockTimes, Rates, block_times
from paddle_dp.plan.link_time import gradient_seconds, handover_seconds, sequence_seconds, tensor_seconds
from paddle_dp.plan.workload import Numbers, Workload

# The terms of a step, as a person reads them: each name's keys in `StepTime.terms`.
SHARES = {
    "compute": ("products", "attention", "elementwise", "head", "host"), "tensor": ("tensor",),
    "sequence": ("sequence",), "bubble": ("bubble",), "stages": ("stages",), "gradients": ("data",),
    "update": ("update",), "rest": ("fixed",),
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
            name: float(sum(self.terms[part][index] for part in terms)) / total
            for name, terms in SHARES.items()
        }


def step_time(load: Workload, rates: Rates = SHEET) -> StepTime:
    """The forecast of each layout of the workload, by the constants `rates`."""
    block = block_times(load, rates)
    layer = _layer(load, block, rates)
    every_layer = np.sum(list(layer.values()), axis=0)
    head = block.head + 2 * tensor_seconds(load, rates)
    # The slowest of the stages sets the pace: the one with most blocks, or the last one with the head.
    fullest, last = load.full_depth * every_layer, load.last_depth * every_layer + head
    depth = np.where(last >= fullest, load.last_depth, load.full_depth)
    terms = {name: load.micros * depth * seconds for name, seconds in layer.items()}
    terms["head"] = load.micros * np.where(last >= fullest, head, 0.0)
    slot = load.depth / load.pipeline * every_layer
    terms["bubble"] = (load.pipeline - 1) / load.virtual_stages * slot
    handovers = np.where(
        load.overlaps_stages == 1, load.pipeline - 1, load.micros * load.virtual_stages + load.pipeline - 1
    )
    terms["stages"] = 2 * handover_seconds(load, rates) * handovers
    weights = rank_weights(load)
    terms["data"] = _exposed(load, weights, slot, load.micros * (slot + head), rates)
    shards = np.where(load.stage > 0, np.maximum(load.sharded, 1.0), 1.0)
    terms["update"] = weights * UPDATE_BYTES / shards / (load.memory_rate * rates.memory)
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
    hides = np.where(
        load.stage == 3, 1.0, rates.hides
    )  # stage 3 prefetches, and its last bucket is one layer's
    hidden = np.where(every | (load.overlaps_data == 1), hides, 0.0) * exchange
    return exchange - np.minimum(hidden, np.where(every, all_work, last_backward))
