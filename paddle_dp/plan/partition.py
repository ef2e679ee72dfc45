"""Deals a pipeline's ordered blocks to its stages: each stage gets consecutive blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

Partition = Literal["uniform", "parameters"] | tuple[int, ...]


def stage_bounds(weights: Sequence[int], stages: int, partition: Partition = "uniform") -> list[int]:
    """The stages' bounds: stage s holds blocks [bounds[s], bounds[s + 1]).

    `weights`: the blocks' numbers of parameters. uniform: equal numbers of blocks, the remainder to the last stages, as
    fleet does. parameters: the largest stage is as small as possible. A tuple gives the number of blocks of each stage.
    """
    if partition == "parameters":
        return _balanced(list(accumulate(weights, initial=0)), stages)
    if partition == "uniform":
        each, more = divmod(len(weights), stages)
        return list(accumulate([each] * (stages - more) + [each + 1] * more, initial=0))
    return list(accumulate(partition, initial=0))


def check_partition(partition: Partition, blocks: int, stages: int) -> list[str]:
    """The reasons why this partition does not fit the blocks and stages, one sentence each."""
    if stages > blocks:
        return [f"{stages} pipeline stages need as many blocks, and the model has {blocks}"]
    if isinstance(partition, str):
        return []
    if len(partition) != stages:
        return [f"partition names {len(partition)} stages, and there are {stages}"]
    if sum(partition) != blocks:
        return [f"partition deals {sum(partition)} blocks, and the model has {blocks}"]
    return []


def unlearning(bounds: Sequence[int], ranks: int, learns: Sequence[int]) -> list[str]:
    """Ranks of a pipeline that train nothing, one sentence each. `learns`: the number of trained parameters of each
    block."""
    reasons = []
    for rank in range(ranks):
        stages = range(rank, len(bounds) - 1, ranks)
        numbers = [number for stage in stages for number in range(bounds[stage], bounds[stage + 1])]
        count, blocks = sum(learns[number] for number in numbers), ", ".join(map(str, numbers))
        if not count:
            reasons.append(
                f"stage {rank} of the pipeline would hold nothing that learns (block {blocks}): "
                "set strategy.partition to parameters, or to a list"
            )
    return reasons


def _balanced(before: list[int], stages: int) -> list[int]:
    """The bounds with the smallest maximal sum; of several, the ones with the smallest sum of squares.

    `before[i]`: the sum of the first i weights. best[i]: the best bounds of the first i blocks, for the stages so far.
    """
    blocks = len(before) - 1
    best = {i: (before[i], before[i] ** 2, [0, i]) for i in range(1, blocks + 1)}
    for stage in range(2, stages + 1):
        best = {
            i: min(
                (max(best[j][0], before[i] - before[j]), best[j][1] + (before[i] - before[j]) ** 2, [*best[j][2], i])
                for j in range(stage - 1, i)
            )
            for i in range(stage, blocks + 1)
        }  # fmt: skip
    return best[blocks][2]
