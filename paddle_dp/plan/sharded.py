"""What sharding cannot do, refused before any process starts; and the chunks in which stage 3's parameters travel."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

SMALL = 4  # a chunk has at least 1/4 of a typical layer: a norm's time hides no matrix
LEVEL = 1.2  # and no owner sends more than 1.2 times its share of it
WIDE = (
    1.25  # or as much as 1.25 typical layers for each of the ranks, which are taken for 4 where they are more
)
RANKS = 4


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

    A parameter has one owner, so that one alone would use one direction of one link: a chunk is some layers in a row,
    of which all owners send about the same. A typical layer is the median of those above the mean.
    """
    sizes = [sum(load) for load in loads]
    if not any(sizes):
        return [0] * len(sizes)
    typical, ranks = median(size for size in sizes if size >= mean(sizes)), len(loads[0])
    found, chunk, have = [], 0, [0] * ranks
    for load in loads:
        found.append(chunk)
        have = [a + b for a, b in zip(have, load, strict=True)]
        level = max(have) * ranks <= LEVEL * sum(have)
        if (level and sum(have) >= typical / SMALL) or sum(have) >= WIDE * min(ranks, RANKS) * typical:
            chunk, have = chunk + 1, [0] * ranks
    return found


def most_lent(loads: Sequence[Sequence[int]], owner: int, ahead: int) -> int:
    """The bytes of the other owners' parameters that are with one owner at most, where layers of these `loads` run one
    after the other, forth and back, and `ahead` chunks are under way besides the one at work."""
    order = [*loads, *reversed(loads)]
    numbers = chunks(order) if ahead else range(len(order))
    of_chunks = [0] * len(order)
    for number, load in zip(numbers, order, strict=True):
        of_chunks[number] += sum(load) - load[owner]
    return max(sum(of_chunks[at : at + 1 + ahead]) for at in range(len(order)))
