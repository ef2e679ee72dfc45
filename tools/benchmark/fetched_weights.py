"""What ZeRO's stage 3 sends in an update of one rank: parameters before its layers, and gradients after them.

Both travel in chunks of consecutive layers (`plan.sharded.chunks`), as in `axes/sharding/prefetch_trace.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_dp.plan.activations import recomputed_blocks
from paddle_dp.plan.layout import Blocks, Layout, Weight, layer_loads, layers
from paddle_dp.plan.pipeline_schedule import Kind
from paddle_dp.plan.sharded import chunks, travels

Passes = Sequence[tuple[Kind, Sequence[int]]]  # each forward and backward, through these blocks


@dataclass(frozen=True, kw_only=True)
class Use:
    """A layer in one pass. `fetched`: those of its `weights` that are not held since their last use; they travel in
    this `chunk`, with others. `gradients`: the weights whose gradients it computes, in the order of backward, each with
    whether it is the last one of the chunk in which its gradient travels."""

    weights: Sequence[Weight]
    fetched: Sequence[Weight]
    chunk: int
    gradients: Sequence[tuple[Weight, bool]]


def uses(blocks: Blocks, passes: Passes, layout: Layout, owners: Mapping[str, int]) -> list[list[Use]]:
    """The uses of a rank in an update: for each pass, one list for each of its blocks. In a pipeline every use fetches,
    as in `plan.exchange`."""
    layers_of = {number: layers(blocks[number]) for _, numbers in passes for number in numbers}
    table = [(number, layer) for number, of_block in layers_of.items() for layer in of_block]
    loads = [tuple(load) for load in layer_loads([layer for _, layer in table], owners, layout)]
    # The layers of each block in each pass, and how many of them run forward.
    order: list[tuple[list[int], int]] = []
    again = recomputed_blocks(len(blocks), layout.recompute)
    for kind, numbers in passes:
        for number in numbers:
            own = [at for at, (block, _) in enumerate(table) if block == number]
            ahead = own if kind == "forward" or number in again else []
            order.append(([*ahead, *(reversed(own) if kind == "backward" else ())], len(ahead)))
    flat = tuple(at for of_block, _ in order for at in of_block)
    numbers = chunks([loads[at] for at in flat]) if layout.prefetch else [*range(len(flat))]
    pipeline = layout.degrees.pipeline > 1
    goes = [True] * len(flat) if pipeline else travels(flat, tuple(loads), layout.prefetch)
    gradients = [
        [weight for weight in reversed(table[at][1]) if place >= ahead and not weight.frozen]
        for of_block, ahead in order
        for place, at in enumerate(of_block)
    ]
    in_order = [weight for of_use in gradients for weight in of_use]
    of_gradients = chunks(layer_loads([[weight] for weight in in_order], owners, layout))
    is_last = (one != other for one, other in zip(of_gradients, [*of_gradients[1:], None], strict=True))
    made = iter(
        Use(
            weights=table[at][1], fetched=table[at][1] if go else (), chunk=number,
            gradients=[(weight, next(is_last)) for weight in of_use],
        )
        for at, go, number, of_use in zip(flat, goes, numbers, gradients, strict=True)
    )  # fmt: skip
    return [[next(made) for _ in of_block] for of_block, _ in order]
