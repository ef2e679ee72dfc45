"""Dropout masks as a pure function of (seed, update, sample's index in the global batch, call, position).

    keys of a sample    two 32-bit words: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over seed, update, index and call
    bits of an element  a counter hash: two multiply-xorshift rounds (constants of lowbias32, Wellons 2018) of its
                        position in the whole sample; the first key enters before them, the second between them
    dropped             bits < p · 2^32

With a single 32-bit key the streams of two samples could overlap (5e-4 for a pair of a million elements each). On a CPU
NumPy computes the masks; on other devices int32 operations of Paddle give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_dp.mesh.copies import to_device

Uint32Array = NDArray[np.uint32]
Keys = tuple[Uint32Array, Uint32Array]  # two words per sample, [n] each
Ranges = tuple[tuple[int, int], ...]  # start and stop of each dim

SHARED = 2**64 - 1  # the sample index of a mask that all samples share
# Elements hashed at a time: they stay in the cache, which is 2 to 4 times as fast as all at once.
CHUNK = 2**16
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_M0, _M1, _M2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B


def hash64(*numbers: int) -> int:
    """One 64-bit word that depends on every bit of each number and on their order."""
    z = 0
    for number in numbers:
        z = (z ^ ((number & _MASK) + 0x1234567)) + _GOLDEN & _MASK
        z = (z ^ z >> 30) * _FIRST & _MASK
        z = (z ^ z >> 27) * _SECOND & _MASK
        z ^= z >> 31
    return z


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, elementwise."""
    with np.errstate(over="ignore"):
        z = z + np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
        return z ^ (z >> np.uint64(31))


def sample_hashes(update: int, sample_positions: Sequence[int]) -> NDArray[np.uint64]:
    """One word per sample, from its index in the global batch and the update (as a `hash64`)."""
    return _mixed(np.array(sample_positions, np.uint64) ^ np.uint64(update))


def keys(samples: NDArray[np.uint64], call: int) -> Keys:
    """The keys of samples, given by their `sample_hashes`, in one call (as a `hash64`)."""
    z = _mixed(samples ^ np.uint64(call))
    return z.astype(np.uint32), (z >> np.uint64(32)).astype(np.uint32)


def numbers(sample_keys: Keys) -> NDArray[np.float64]:
    """One uniform number per sample [n], from 0 to below 1: a multiple of 2^-24, so that float32 represents it
    exactly."""
    return (sample_keys[0] >> np.uint32(8)) * 2.0**-24


@lru_cache(maxsize=32)
def positions(full_shape: tuple[int, ...], ranges: Ranges) -> Uint32Array:
    """The first hash round of each position in slice `ranges` of a sample of shape `full_shape`. Flat."""
    with np.errstate(over="ignore"):
        h = np.arange(math.prod(full_shape), dtype=np.uint32) * np.uint32(_M0)
        h ^= h >> np.uint32(16)
        h *= np.uint32(_M1)
    box = h.reshape(full_shape)[tuple(slice(*span) for span in ranges)]
    return np.ascontiguousarray(box).reshape(-1)


def bound(p: float) -> int:
    """The int32 bound: bits below it are dropped with probability `p` < 1."""
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


def dropped(sample_keys: Keys, position_hashes: Uint32Array, p: float) -> NDArray[np.bool_]:
    """Which elements are dropped: bool [n, positions], each True with probability `p` from 0 to below 1."""
    n, count, limit = len(sample_keys[0]), position_hashes.size, np.int32(bound(p))
    out = np.empty((n, count), np.bool_)
    columns = max(min(count, CHUNK), 1)
    rows = max(CHUNK // columns, 1)
    hashes, spare = np.empty((2, min(rows, n), columns), np.uint32)
    for top in range(0, n, rows):
        first, second = sample_keys[0][top : top + rows, None], sample_keys[1][top : top + rows, None]
        for left in range(0, count, columns):
            chunk = position_hashes[left : left + columns]
            h, other = hashes[: len(first), : chunk.size], spare[: len(first), : chunk.size]
            np.add(chunk, first, out=h)
            _round(h, other, 15, _M2)
            np.bitwise_xor(h, second, out=h)
            _round(h, other, 16, _M1)
            np.right_shift(h, np.uint32(15), out=other)
            np.bitwise_xor(h, other, out=h)
            np.less(h.view(np.int32), limit, out=out[top : top + rows, left : left + columns])
    return out


def _round(h: Uint32Array, spare: Uint32Array, shift: int, factor: int) -> None:
    np.right_shift(h, np.uint32(shift), out=spare)
    np.bitwise_xor(h, spare, out=h)
    np.multiply(h, np.uint32(factor), out=h)


def dropped_on_device(
    sample_keys: Keys, full_shape: tuple[int, ...], ranges: Ranges, p: float, device: Any
) -> paddle.Tensor:
    """The same bits as `dropped`, bool [n, positions], computed on `device`.

    It uses int32 with wrapping products and sums: Paddle has no uint32 arithmetic (3.3.1).
    """
    sample_hashes = np.stack(sample_keys).view(np.int32)[:, :, None]
    first, second = to_device(sample_hashes, device)
    h = _positions_on_device(full_shape, ranges, str(device)) + first
    h = _round_on_device(h, 15, _M2)
    h = _round_on_device(h.bitwise_xor(second), 16, _M1)
    return _xor_shifted(h, 15) < paddle.full([], bound(p), "int32")


@lru_cache(maxsize=32)
def _positions_on_device(full_shape: tuple[int, ...], ranges: Ranges, device: str) -> paddle.Tensor:
    return paddle.to_tensor(positions(full_shape, ranges).view(np.int32))


def _round_on_device(h: paddle.Tensor, shift: int, factor: int) -> paddle.Tensor:
    signed = int(np.uint32(factor).astype(np.int32))
    return _xor_shifted(h, shift) * paddle.full([], signed, "int32")


def _xor_shifted(h: paddle.Tensor, shift: int) -> paddle.Tensor:
    """h ^ (h >> shift), with a logical shift."""
    by = paddle.full([], shift, "int32")
    return h.bitwise_xor(paddle.bitwise_right_shift(h, by, is_arithmetic=False))


def everything(shape: Sequence[int]) -> Ranges:
    """The full range of every dim."""
    return tuple((0, size) for size in shape)
