"""The weights that ZeRO's stage 3 fetches for each block of a rank, in the order of its passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from paddle_dp.plan.rank_memory import Blocks, Layout, Weight, layer_loads, layers
from paddle_dp.plan.sharded import travels

Fetches = Mapping[tuple[int, str, int], Sequence[Weight]]  # by pass, "forward" or "backward", and block


def fetched_weights(
    blocks: Blocks, own_blocks: Sequence[int], layout: Layout, owners: Mapping[str, int], passes: int
) -> Fetches:
    """The weights, also the rank's own, that are fetched for each of its `own_blocks` in the forward and the backward
    of so many `passes`. What is still held since its last use is not fetched again; in a pipeline every use counts, as
    in `plan.exchange`."""
    numbered = [(number, layer) for number in own_blocks for layer in layers(blocks[number])]
    loads = layer_loads([layer for _, layer in numbered], owners, layout)
    backward = []
    for number in reversed(own_blocks):
        of_block = [at for at, (block, _) in enumerate(numbered) if block == number]
        again = of_block if is_recomputed(layout, len(blocks), number) else ()
        backward += [*again, *reversed(of_block)]
    uses = [("forward", at) for at in range(len(numbered))] + [("backward", at) for at in backward]
    goes = [True] * len(uses)
    if layout.degrees.pipeline == 1:
        order = tuple(at for _, at in uses) * passes
        goes = travels(order, tuple(map(tuple, loads)), layout.prefetch)
    fetches: defaultdict[tuple[int, str, int], list[Weight]] = defaultdict(list)
    for number, ((kind, at), go) in enumerate(zip(uses * passes, goes, strict=True)):
        block, layer = numbered[at]
        fetches[number // len(uses), kind, block] += layer if go else ()
    return fetches


def is_recomputed(layout: Layout, blocks: int, number: int) -> bool:
    """Whether backward computes this one of the model's `blocks` once more: no end of it is."""
    every = layout.recompute.blocks
    return bool(every) and 0 < number < blocks - 1 and number % every == 0
