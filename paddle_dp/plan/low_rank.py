"""Which gradients are sent as two thin factors (PowerSGD, Vogels et al., arXiv:1905.13727): how many numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

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
