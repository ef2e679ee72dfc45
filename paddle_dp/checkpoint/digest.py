"""Digests of tensors that do not depend on how they are split: the shards' sums add up to the whole tensor's sum.

An element with the bits b (unsigned, at most 32 bits) at the position (i, j, …) of the whole tensor counts as
b · k0(i) · k1(j) · … modulo 2^64, with odd factors drawn from the positions. Ranks gather only one number per shard.
This is a multilinear hash (Carter and Wegman 1979): a change of one element always changes the sum; any other
accidental change stays undetected about once in 2^32. It is not a signature: collisions can be constructed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from paddle_dp.checkpoint.shards import Box, ShardInfo, TensorShard

MODULUS = 2**64
_BLOCK = 2**17  # elements per block, which fits the processor's cache
_COLUMNS = 2**14
_UINT64 = np.uint64
Uint64Array = np.ndarray


@dataclass(frozen=True)
class TensorSum:
    """The dtype, shape and sum that identify a whole tensor's content."""

    dtype: str
    shape: tuple[int, ...]
    sum: int


def sum_of(array: np.ndarray, offset: Iterable[int] = ()) -> int:
    """The sum of a shard at `offset` (default: 0 in every dim) in its tensor."""
    if array.size == 0:
        return 0
    array = np.atleast_1d(array)
    bits = _bits(array)
    first, *trailing = (*(tuple(offset) or (0,) * array.ndim), 0)
    after = [_factors(dim, start, bits.shape[dim]) for dim, start in enumerate(trailing, start=1)]
    step, total = max(1, _BLOCK // math.prod(bits.shape[1:])), 0
    for at in range(0, len(bits), step):
        block = bits[at : at + step]
        total += _sum(block, [_factors(0, first + at, len(block)), *after])
    return total % MODULUS


def _sum(bits: Uint64Array, factors: list[Uint64Array]) -> int:
    """Sums a block as a matrix of leading × trailing dims, weighted by both dims' factors."""
    split = _split(bits.shape)
    outer, inner = _product(factors[:split]), _product(factors[split:])
    row_sums = np.einsum("ij,j->i", bits.reshape(len(outer), len(inner)), inner) * outer
    return int(row_sums.sum(dtype=_UINT64))


def shard_sum(shard: TensorShard) -> int:
    """The shard's contribution to its tensor's sum."""
    return sum_of(shard.array, shard.offset)


def tensor_sums(shards: Iterable[ShardInfo]) -> dict[str, TensorSum]:
    """Adds up the sums that were saved with the shards. A box that several ranks saved counts once."""
    sums: dict[str, TensorSum] = {}
    counted: set[tuple[str, Box]] = set()
    for shard in shards:
        if (shard.name, shard.box) in counted:
            continue
        counted.add((shard.name, shard.box))
        before = sums[shard.name].sum if shard.name in sums else 0
        sums[shard.name] = TensorSum(shard.dtype, shard.global_shape, (before + shard.sum) % MODULUS)
    return sums


def digest(tensors: Mapping[str, TensorSum]) -> str:
    """32 hexadecimal digits of a set of tensors: their names, dtypes, shapes and sums."""
    lines = [f"{name} {t.dtype} {list(t.shape)} {t.sum:016x}" for name, t in sorted(tensors.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def digests_of(tensors: Mapping[str, TensorSum]) -> dict[str, str]:
    """The digests of a checkpoint's "model", "optimizer" and "ema" tensors; groups without tensors are left out."""
    kinds = ("model", "optimizer", "ema")
    tables = {kind: {n: t for n, t in tensors.items() if n.startswith(f"{kind}/")} for kind in kinds}
    return {kind: digest(table) for kind, table in tables.items() if table}


def _bits(array: np.ndarray) -> Uint64Array:
    """The elements' bits, [*shape, words]: two words per element of 64 bits, else one."""
    array = np.ascontiguousarray(array)
    size = array.dtype.itemsize
    kind = np.dtype(f"<u{min(size, 4)}")
    return array.reshape(-1).view(kind).reshape(*array.shape, max(1, size // 4))


def _split(shape: tuple[int, ...]) -> int:
    """The number of leading dims that form the matrix's rows; the columns are the last dims, up to `_COLUMNS` long."""
    split = max(0, len(shape) - 2)
    while split and math.prod(shape[split - 1 :]) <= _COLUMNS:
        split -= 1
    return split


def _factors(dim: int, start: int, length: int) -> Uint64Array:
    """Odd factors of the positions start, start + 1, … along a dim: splitmix64 of (dim, position)."""
    seed = (0x9E3779B97F4A7C15 * (start + 1 + (dim << 48))) % MODULUS
    z = _UINT64(seed) + np.arange(length, dtype=_UINT64) * _UINT64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> _UINT64(30))) * _UINT64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _UINT64(27))) * _UINT64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> _UINT64(31))) | _UINT64(1))


def _product(factors: list[Uint64Array]) -> Uint64Array:
    """The outer product of the factors of several dims, flattened in row-major order."""
    return reduce(lambda a, b: (a[:, None] * b[None, :]).reshape(-1), factors, np.ones(1, _UINT64))
