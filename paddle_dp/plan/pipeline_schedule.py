"""Pipelines as arithmetic: the blocks of each stage, the order and the times of its work, and its idle time.

A stage has consecutive blocks. By default a forward takes one unit of time, a backward two, and sending none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Partition = Literal["uniform", "parameters"] | tuple[int, ...]
Kind = Literal["forward", "backward"]
Schedule = Literal["f_then_b", "1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch's forward or backward through a rank's stage number `chunk`, counted from 0."""

    kind: Kind
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class WorkSpan:
    """Start and stop of a stage's work, in seconds (or units) from the beginning of the batch."""

    stage: int
    work: Work
    start: float
    stop: float


def bubble(stages: int, micro_batches: int, virtual_stages: int = 1) -> float:
    """The share of time that each stage is idle, if all have equal work and sending takes no time.

    (p − 1) / (m + p − 1) (Huang et al. 2019, arXiv:1811.06965); with v stages on each rank (p − 1) / (v·m + p − 1)
    (Narayanan et al. 2021, arXiv:2104.04473, divide by the time of the work alone: (p − 1) / (v·m)).
    """
    return (stages - 1) / (virtual_stages * micro_batches + stages - 1)


def check_schedule(schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> list[str]:
    """The reasons why a schedule cannot run, one sentence each."""
    reasons = []
    if schedule == "1f1b" and virtual_stages > 1:
        reasons.append(
            f"schedule 1f1b has one stage on each rank, and virtual_stages is {virtual_stages}: take interleaved"
        )
    if schedule == "interleaved" and virtual_stages == 1:
        reasons.append("schedule interleaved needs virtual_stages of 2 or more")
    if virtual_stages > 1 and micro_batches % stages:
        reasons.append(
            f"several stages on a rank need micro_batches ({micro_batches}) to be a multiple of pipeline {stages}"
        )
    return reasons


def orders(schedule: str, stages: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Work]]:
    """The work of each of `stages` ranks, in fleet's order.

    interleaved, and f_then_b with several stages per rank, need a multiple of `stages` micro-batches.
    """
    forwards, backwards = _directions(schedule, stages, micro_batches, virtual_stages)
    warmups = [_warmup(schedule, stages, micro_batches, virtual_stages, stage) for stage in range(stages)]
    return [list(_in_turn(forwards, backwards, first)) for first in warmups]


def _directions(
    schedule: str, stages: int, micro_batches: int, virtual_stages: int
) -> tuple[list[Work], list[Work]]:
    """All forwards and backwards of a rank, in order: rounds of micro-batches, chunk by chunk."""
    turn = stages if schedule == "interleaved" else micro_batches
    rounds = [range(first, min(first + turn, micro_batches)) for first in range(0, micro_batches, turn)]

    def in_order(kind: Kind, chunks: Sequence[int]) -> list[Work]:
        return [Work(kind, each, chunk) for batches in rounds for chunk in chunks for each in batches]

    chunks = range(virtual_stages)
    return in_order("forward", chunks), in_order("backward", chunks[::-1])


def _warmup(schedule: str, stages: int, micro_batches: int, virtual_stages: int, stage: int) -> int:
    """The number of a stage's warm-up forwards, before it alternates forward and backward."""
    later_stages = stages - stage - 1
    if schedule == "f_then_b":
        return micro_batches * virtual_stages
    if schedule == "1f1b":
        return min(later_stages, micro_batches)
    if schedule == "interleaved":
        return min(2 * later_stages + (virtual_stages - 1) * stages, micro_batches * virtual_stages)
    raise ValueError(f"the order of the schedule '{schedule}' is not known")


def _in_turn(forwards: list[Work], backwards: list[Work], warmup: int) -> Iterable[Work]:
    """`warmup` forwards, then a forward and a backward alternately, then the remaining backwards."""
    yield from forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - warmup :]


def timeline(
    ordered: Sequence[Sequence[Work]],
    seconds: Callable[[int, Work], float] | None = None,
    sending: float = 0.0,
) -> list[WorkSpan]:
    """The spans of all work if every stage begins each piece as soon as it can.

    `seconds(stage, work)`: its duration; `sending`: the seconds in which its result reaches another stage. Raises
    ValueError for orders with a deadlock.
    """
    last = len(ordered) * (1 + max(work.chunk for order in ordered for work in order)) - 1
    takes = seconds or (lambda _, work: 1.0 if work.kind == "forward" else 2.0)
    done: dict[tuple[Kind, int, int], float] = {}
    spans: list[WorkSpan] = []
    free, at = [0.0] * len(ordered), [0] * len(ordered)
    while any(position < len(order) for position, order in zip(at, ordered, strict=True)):
        before = len(spans)
        for stage, order in enumerate(ordered):
            while at[stage] < len(order):
                work = order[at[stage]]
                virtual_stage = work.chunk * len(ordered) + stage
                needs = _needs(work, virtual_stage, last)
                if needs is not None and needs not in done:
                    break
                crossing = sending if needs and needs[2] != virtual_stage else 0.0
                start = max(free[stage], done[needs] + crossing if needs else 0.0)
                free[stage] = done[work.kind, work.micro_batch, virtual_stage] = start + takes(stage, work)
                spans.append(WorkSpan(stage, work, start, free[stage]))
                at[stage] += 1
        if len(spans) == before:
            raise ValueError("deadlock: with these orders the stages wait for each other for ever")
    return spans


def _needs(work: Work, virtual_stage: int, last: int) -> tuple[Kind, int, int] | None:
    """The work that must be done first: forward on the previous stage; backward on the next (last: its forward)."""
    if work.kind == "forward":
        return ("forward", work.micro_batch, virtual_stage - 1) if virtual_stage else None
    is_last = virtual_stage == last
    return "forward" if is_last else "backward", work.micro_batch, virtual_stage + (not is_last)


def idle(spans: Sequence[WorkSpan], stages: int) -> list[float]:
    """The share of a batch's time, first start to last stop, in which each stage is idle."""
    length = max(span.stop for span in spans) - min(span.start for span in spans)
    busy = [sum(span.stop - span.start for span in spans if span.stage == stage) for stage in range(stages)]
    return [1 - each / length for each in busy]


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
    """Ranks of a pipeline that train nothing, one sentence each. `learns`: the trained parameters of each block."""
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
