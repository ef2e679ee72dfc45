"""What sharding cannot do, refused before any process starts; and the chunks in which stage 3's parameters travel."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

WIDE = 1.5  # a chunk is as much as 1.5 typical layers for each rank at most; more than 4 ranks count as 4
RANKS = 4
LAUNCH = (
    1 / 64
)  # of a typical layer's bytes: what a chunk costs besides them, so that a norm goes with a matrix


def unshardable(sharding: int, pipeline: int, offload: bool, tied: bool, device: str) -> str | None:
    """The reason in one sentence, with what to do about it, or None.

    `tied`: the model's head uses the embedding's weights; `device`: "cpu" or "gpu".
    """
    if offload and device == "cpu":
        return (
            "strategy.offload moves optimizer states from a GPU's memory to the host's, and there is no GPU here: "
            "set strategy.offload=false."
        )
    if offload and sharding == 1:
        return "strategy.offload belongs to sharding: set strategy.sharding to 2 or more, or strategy.offload=false."
    if tied and sharding > 1 and pipeline > 1:
        return (
            "strategy: tied weights lie on two stages of a pipeline, and sharding would give each its own owner. "
            "Set model.tied=false, strategy.sharding=1 or strategy.pipeline=1."
        )
    return None


def chunks(loads: Sequence[Sequence[int]]) -> list[int]:
    """In which chunk each of some layers travels, whose parameters have so many bytes at each owner, [layers, owners].

    A parameter has one owner, so that one alone would use one direction of one link. A chunk is some layers in a row;
    all are cut so that the busiest owners of the chunks send as little as possible together. A typical layer is the
    median of those above the mean.
    """
    sizes = [sum(load) for load in loads]
    if not any(sizes):
        return [0] * len(sizes)
    typical, ranks = median(size for size in sizes if size >= mean(sizes)), len(loads[0])
    widest = WIDE * min(ranks, RANKS) * typical
    cost, begins = [0.0], [0]  # of the first layers, cut in the best way, and where their last chunk begins
    for end in range(1, len(loads) + 1):
        have, best = [0] * ranks, (float("inf"), 0)
        for begin in range(end - 1, -1, -1):
            have = [a + b for a, b in zip(have, loads[begin], strict=True)]
            if begin < end - 1 and sum(have) > widest:
                break
            best = min(best, (cost[begin] + ranks * max(have) + LAUNCH * typical, begin))
        cost.append(best[0])
        begins.append(best[1])
    firsts, end = set(), len(loads)
    while end:
        end = begins[end]
        firsts.add(end)
    return [sum(first <= layer for first in firsts) - 1 for layer in range(len(loads))]


def most_lent(loads: Sequence[Sequence[int]], owner: int, ahead: int) -> int:
    """The bytes of the other owners' parameters that are with one owner at most, where layers of these `loads` run one
    after the other, forth and back, and `ahead` chunks are under way besides the one at work."""
    order = [*loads, *reversed(loads)]
    numbers = chunks(order) if ahead else range(len(order))
    of_chunks = [0] * len(order)
    for number, load in zip(numbers, order, strict=True):
        of_chunks[number] += sum(load) - load[owner]
    return max(sum(of_chunks[at : at + 1 + ahead]) for at in range(len(order)))
