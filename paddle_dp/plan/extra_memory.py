"""Bytes that a rank holds in addition to weights, gradients and optimizer states: copies, residuals, messages.

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

from collections.abc import Iterable, Sequence
from math import prod

from paddle_dp.units import Compress

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


ERROR = 4  # bytes of a residual's element, if weights have fewer
NARROW = 2  # bytes of an element that is sent


def residual_bytes(
    compress: Compress, weights: Iterable[tuple[int, Sequence[int]]], width: int, accelerator: bool
) -> float:
    """Bytes of the compression residuals of these weights, (elements, shape) each, of `width` bytes an element."""
    if not compress:
        return 0.0
    width, low_rank = max(width, ERROR), compress.kind == "power_sgd"
    elements = sum(size for size, shape in weights if not low_rank or is_worthwhile(shape, compress.rank))
    each = 3 * width if low_rank else 2 * width + (2 * NARROW if accelerator else 0)
    return float(each * elements)


def flat_gradient_bytes(way: str, gradients: float, bucket: float) -> float:
    """Bytes of flat gradients in addition to the gradients, by the exchange's name."""
    reducer_bytes = gradients + min(bucket, gradients)
    return {"after": gradients, "bucketed": reducer_bytes}.get(way, 0.0)


def inbound_bytes(elements: int, width: int, workers: int, in_step: bool) -> float:
    """Bytes of the workers' gradients on a server that owns `elements`, in addition to the sum for its update."""
    times = max(workers - 1, 1) if in_step else workers + 2
    return float(times * elements * width)
