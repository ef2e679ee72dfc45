"""Bytes that a rank keeps beside weights, gradients and optimizer states: copies, errors, what comes to a server.

At most, for Ψ bytes of trained weights, as many of gradients, n ranks or workers, s servers:

    local_sgd                     Ψ              the weights with which the period began
      with an outer optimizer     2Ψ             and its velocity
    async_average                 (2 + 1/n)Ψ     where the round began, what is under way, and a part of the center
    compress, to 16 bits          2Ψ             errors in float32: those of the last update, and of the one being made
      on accelerators             3Ψ             and what is sent and has come, in 16 bits
    compress, to low rank         3Λ             the same errors, and gradients with errors added, of the Λ bytes
                                                 of the matrices that are sent as factors
    exchange after                Ψ              all gradients, flat
    Paddle's reducer              Ψ + a bucket   the same, and one on its way (3.3.1): data_parallel's `bucketed`
    reduce_dtype, data alone      Ψ/2            on accelerators: sums as they came, until gradients are made of them
    a server, in step             max(n−1, 1)·Ψ/s   gradients that have come, until all workers' have: they are added in
                                                 the order of ranks, in the memory of the first
    a server, as workers come     (n + 2)·Ψ/s    a message of each, the sum, and the values that were sent last

A worker needs nothing: when the new values come, Ψ at most, its gradients have left, for servers answer behind them.

Which gradients are sent as two thin factors (PowerSGD, Vogels et al., arXiv:1905.13727): how many numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from paddle_dp.units import Compress

TWICE = 2  # times as many numbers a matrix must have as its factors, or it is sent whole


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The shape [first dim, all others] of a tensor as a matrix."""
    return (int(shape[0]) if shape else 1), prod(int(size) for size in shape[1:])


def factors(shape: Sequence[int], rank: int) -> int:
    """The numbers of two factors of `rank` columns."""
    return sum(matrix(shape)) * rank


def is_worthwhile(shape: Sequence[int], rank: int) -> bool:
    """Whether a gradient of this shape is sent as two factors of `rank` columns."""
    rows, columns = matrix(shape)
    return len(shape) > 1 and TWICE * factors(shape, rank) <= rows * columns


ERROR = 4  # bytes of an error's number, where weights have fewer
NARROW = 2  # of a number that travels


def residual_bytes(
    compress: Compress, weights: Iterable[tuple[int, Sequence[int]]], width: int, accelerator: bool
) -> float:
    """Bytes of what compression has left out of the gradients of these weights, (elements, shape) each, of `width`
    bytes an element."""
    if not compress:
        return 0.0
    width, low_rank = max(width, ERROR), compress.kind == "power_sgd"
    elements = sum(size for size, shape in weights if not low_rank or is_worthwhile(shape, compress.rank))
    each = 3 * width if low_rank else 2 * width + (2 * NARROW if accelerator else 0)
    return float(each * elements)


def flat_gradient_bytes(way: str, gradients: float, bucket: float) -> float:
    """Bytes of flat gradients beside the gradients themselves, by the word for their exchange."""
    reducer_bytes = gradients + min(bucket, gradients)
    return {"after": gradients, "bucketed": reducer_bytes}.get(way, 0.0)


def inbound_bytes(elements: int, width: int, workers: int, in_step: bool) -> float:
    """Bytes of the workers' gradients with a server that owns so many elements, beside the sum that it updates with."""
    times = max(workers - 1, 1) if in_step else workers + 2
    return float(times * elements * width)
