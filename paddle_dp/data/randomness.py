"""Random numbers per sample, seeded by (seed, epoch, index): augmentation is independent of layout and workers.

A data set's transforms draw from Python's `random` and `numpy.random`. Both are seeded before each sample, so a sample
is augmented equally in any worker, on any number of ranks and in a resumed run. Both are restored afterwards, so
reading data does not change the random numbers of other code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_MASK64 = 2**64 - 1


def _mixed(bits: int) -> int:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): every input bit may change every output bit."""
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK64
    return bits ^ (bits >> 31)


def key(seed: int, epoch: int, index: int) -> int:
    """64 bits from (seed, epoch, index), equal on every machine and in every version."""
    bits = 0
    for number in (seed, epoch, index):
        bits = _mixed((bits + number + 0x9E3779B97F4A7C15) & _MASK64)
    return bits


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seeds `random` and `numpy.random` for this sample of this epoch."""
    bits = key(seed, epoch, index)
    random.seed(bits)
    np.random.seed(bits >> 32)


@contextmanager
def restoring_globals() -> Iterator[None]:
    """Restores the states of `random` and `numpy.random` on exit."""
    python, bits = random.getstate(), np.random.mtrand.get_bit_generator()
    np.random.mtrand.set_bit_generator(np.random.MT19937(0))  # swapping costs 1 µs, copying its state 100
    try:
        yield
    finally:
        random.setstate(python)
        np.random.mtrand.set_bit_generator(bits)
