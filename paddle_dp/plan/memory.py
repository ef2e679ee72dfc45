"""Bytes of parameters, gradients and optimizer states on a rank, by arithmetic.

The formula of ZeRO (Rajbhandari et al., arXiv:1910.02054, section 5, figure 1), for Ψ parameters over N ranks:

    stage   parameters   gradients   optimizer states
      0       p·Ψ          g·Ψ         k·Ψ
      1       p·Ψ          g·Ψ         k·Ψ / N
      2       p·Ψ          g·Ψ / N     k·Ψ / N
      3       p·Ψ / N      g·Ψ / N     k·Ψ / N

with p, g and k the bytes of each for one parameter: 4, 4 and 8 for AdamW in float32; 2, 2 and 12 in mixed precision.

Bytes that a rank holds in addition to weights, gradients and optimizer states: copies, residuals, messages.

Upper bounds, for Ψ bytes of trained weights and Ψ of gradients, n ranks or workers, s servers:

    local_sgd                     Ψ              the weights with which the period began
      with an outer optimizer     2Ψ             and its velocity
    async_average                 (2 + 1/n)Ψ     the weights at the round's start, the message under way, and a part of
                                                 the center
    compress, to 16 bits          2Ψ             residuals in float32: the last update's, and the current one's
      on accelerators             3Ψ             and the sent and received values, in 16 bits
    compress, to low rank         3Λ             the same residuals, and gradients with residuals added, for the Λ bytes
                                                 of the matrices that are sent as factors
    exchange after                Ψ              all gradients, flat
    Paddle's reducer              Ψ + a bucket   the same, and one bucket under way (3.3.1): data_parallel's `bucketed`
    reduce_dtype, data alone      Ψ/2            on accelerators: received sums, until they are converted to gradients
    a server, synchronous         max(n−1, 1)·Ψ/s   gradients received before all workers' are: they are added in rank
                                                 order, in the memory of the first
    a server, asynchronous        (n + 2)·Ψ/s    a message of each worker, the sum, and the values sent last

A worker needs nothing: servers answer after its gradients have left, and the new values take Ψ at most.

It also decides which gradients are sent as two thin factors (PowerSGD, Vogels et al., arXiv:1905.13727).
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any


def states_of(recipe: Any) -> int:
    """Numbers that are kept per element of a trained parameter where it is updated: the optimizer's, as many as
    AdamW's, if it does not say so, and the average of the weights (`ema`)."""
    states: int = getattr(recipe.optimizer.config, "states", 2)
    return states + (recipe.ema is not None)


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes per element: of the parameter, its gradient, its optimizer states (p, g and k of the formula)."""

    parameter: int = 4
    gradient: int = 4
    optimizer: int = 8

    @classmethod
    def for_states(cls, states: int, low: bool = False, double: bool = False) -> Widths:
        """The widths for an optimizer that keeps `states` numbers per element of a parameter
        (`OptimizerConfig.states`). `low`: weights and gradients in 2 bytes, with float32 masters (O2); `double`:
        everything in float64."""
        if double:
            return cls(parameter=8, gradient=8, optimizer=8 * states)
        return cls(parameter=2, gradient=2, optimizer=4 * states + 4) if low else cls(optimizer=4 * states)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """The bytes of parameters, gradients and optimizer states on one rank."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def formula(parameters: int, ranks: int, stage: int, widths: Widths | None = None) -> StateBytes:
    """ZeRO's formula, which splits parameters evenly over `ranks`. `stage` 0: without sharding."""
    return _stage_bytes(float(parameters), parameters / ranks, stage, widths or Widths())


def _stage_bytes(full: float, shard: float, stage: int, widths: Widths) -> StateBytes:
    return StateBytes(
        parameters=widths.parameter * (shard if stage >= 3 else full),
        gradients=widths.gradient * (shard if stage >= 2 else full),
        optimizer=widths.optimizer * (shard if stage >= 1 else full),
    )


def owners(sizes: Sequence[int], ranks: int, before: Sequence[int] = ()) -> list[int]:
    """The rank that owns each parameter: the largest first, each to the rank with the least so far. `before`: the sizes
    that the ranks already own.

    Parameters are not split, as in fleet's DygraphShardingOptimizer, so ranks differ by one parameter at most. Of equal
    ranks, the owner is the one with the most distant parameters in the model: neighbours are exchanged at the same
    time, and several owners use several links.
    """
    return list(_owners(tuple(sizes), ranks, tuple(before)))


@lru_cache(maxsize=512)  # equal stages of a pipeline have equal owners, and a plan asks for many layouts
def _owners(sizes: tuple[int, ...], ranks: int, before: tuple[int, ...]) -> list[int]:
    owner, load = [0] * len(sizes), list(before) or [0] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]  # numbers, in order
    for number in sorted(range(len(sizes)), key=lambda n: sizes[n], reverse=True):
        least = min(load)
        free = [rank for rank in range(ranks) if load[rank] == least]
        owner[number] = chosen = max(free, key=lambda rank: _nearest(owned[rank], number))
        load[chosen] += sizes[number]
        insort(owned[chosen], number)
    return owner


def _nearest(numbers: Sequence[int], number: int) -> float:
    """The distance to the nearest of these sorted numbers."""
    at = bisect(numbers, number)
    return min((abs(number - other) for other in numbers[max(at - 1, 0) : at + 1]), default=math.inf)


def deal(trained: Sequence[int], frozen: Sequence[int], ranks: int) -> tuple[list[int], list[int]]:
    """The owners of trained and of frozen parameters of these sizes. Stage 3 shards frozen ones, too: they even out the
    trained ones' loads."""
    owner_ranks = owners(trained, ranks)
    return owner_ranks, owners(frozen, ranks, owned_sizes(trained, owner_ranks, ranks))


def owned_sizes(sizes: Sequence[int], owner_ranks: Sequence[int], ranks: int) -> list[int]:
    """The sum of the sizes that each rank owns."""
    sums = [0] * ranks
    for size, owner in zip(sizes, owner_ranks, strict=True):
        sums[owner] += size
    return sums


def state_bytes(
    sizes: Sequence[int], ranks: int, stage: int, widths: Widths | None = None
) -> list[StateBytes]:
    """The bytes on each rank of the sharding axis, for parameters of these sizes that are not split."""
    shards = owned_sizes(sizes, owners(sizes, ranks), ranks)
    return [_stage_bytes(float(sum(sizes)), float(shard), stage, widths or Widths()) for shard in shards]


# Copies, residuals, messages ------------------------------------------------------------------------------------------


TWICE = 2  # a matrix with fewer than so many times its factors' elements is sent whole


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The shape [first dim, all others] of a tensor as a matrix."""
    return (int(shape[0]) if shape else 1), prod(int(size) for size in shape[1:])


def factors(shape: Sequence[int], rank: int) -> int:
    """The number of elements of two factors of `rank` columns."""
    return sum(matrix(shape)) * rank


def is_worthwhile(shape: Sequence[int], rank: int) -> bool:
    """Whether a gradient of this shape is sent as two factors."""
    rows, columns = matrix(shape)
    return len(shape) > 1 and TWICE * factors(shape, rank) <= rows * columns


def flat_gradient_bytes(way: str, gradients: float, bucket: float) -> float:
    """Bytes of flat gradients in addition to the gradients, by the exchange's name."""
    reducer_bytes = gradients + min(bucket, gradients)
    nothing = dict.fromkeys(("", "auto", "pushed", "per_parameter"), 0.0)
    return {**nothing, "after": gradients, "bucketed": reducer_bytes}[way]


def inbound_bytes(elements: int, width: int, workers: int, in_step: bool) -> float:
    """Bytes of the workers' gradients on a server that owns `elements`, in addition to the sum for its update."""
    times = max(workers - 1, 1) if in_step else workers + 2
    return float(times * elements * width)
