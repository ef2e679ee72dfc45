"""Who reads what: every sample of an epoch exactly once, as arithmetic on (seed, epoch, dp_rank, dp_size).

    the order of an epoch     a permutation that only the seed and the epoch decide
    global batch k            the k-th run of `batch` samples of it: the same for any number of readers
    micro-batch j of it             the j-th of `micro_batches` consecutive cuts: the same for any number of readers
    a reader's slice of it    the reader's cut of that micro-batch; cuts differ by one sample at most, may be empty

Nothing is padded, repeated or dropped (unless `drop_last` asks for whole batches only).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_dp.errors import DataError

Indices = NDArray[np.int64]


def cut(things: int, part: int, parts: int) -> tuple[int, int]:
    """Where part number `part` of `parts` consecutive parts of `things` things starts and ends."""
    return part * things // parts, (part + 1) * things // parts


@lru_cache(maxsize=64)
def _cuts(size: int, micro_batches: int, dp_rank: int, dp_size: int) -> list[tuple[int, int]]:
    """An epoch has batches of two sizes at most, so this is worked out once for each."""
    found = []
    for micro_batch in range(micro_batches):
        start, stop = cut(size, micro_batch, micro_batches)
        low, high = cut(stop - start, dp_rank, dp_size)
        found.append((start + low, start + high))
    return found


@lru_cache(maxsize=4)
def _order(samples: int, seed: int, epoch: int) -> Indices:
    """The permutation of `samples` that (seed, epoch) decide, read-only.

    Sorting the raw stream of Philox, not `Generator.permutation`: NumPy promises that raw streams never
    change, so a run resumed under a newer NumPy goes on with the same epoch.
    """
    raw = np.random.Philox(np.random.SeedSequence((seed % 2**64, epoch))).random_raw(samples)
    order = np.argsort(raw, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


@lru_cache(maxsize=4)
def _in_order(samples: int) -> Indices:
    order = np.arange(samples, dtype=np.int64)
    order.setflags(write=False)
    return order


@dataclass(frozen=True)
class Sampler:
    """What one of `dp_size` readers takes of `samples` samples, in global batches of `batch`."""

    samples: int
    batch: int
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    micro_batches: int = 1

    def __post_init__(self) -> None:
        counts = {"batch": self.batch, "dp_size": self.dp_size, "micro_batches": self.micro_batches}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: {count} is less than 1")
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"reader: {self.dp_rank} is not one of 0 to {self.dp_size - 1}")
        if self.samples < 1:
            raise DataError("the data set is empty: there is not one sample to read")
        if not self.batches:
            what = f"drop_last: true leaves nothing of {self.samples} samples in batches of {self.batch}"
            raise DataError(f"{what}; set drop_last: false, or make the batch smaller")

    @property
    def batches(self) -> int:
        """How many global batches an epoch has."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def rows(self) -> int:
        """The most samples, dummies included, that this reader reads for any one global batch."""
        sizes = {self.size(0), self.size(self.batches - 1)}
        return max(sum(max(stop - start, 1) for start, stop in self.cuts(size)) for size in sizes)

    def size(self, k: int) -> int:
        """How many samples global batch `k` has: `batch`, or what is left for the last one."""
        if not 0 <= k < self.batches:
            raise IndexError(f"global batch {k}: an epoch has batches 0 to {self.batches - 1}")
        return min(self.batch, self.samples - k * self.batch)

    def order(self, epoch: int) -> Indices:
        """All samples in this epoch's order, int64 [samples], read-only: decided by (seed, epoch) alone."""
        return _order(self.samples, self.seed, epoch) if self.shuffle else _in_order(self.samples)

    def whole(self, epoch: int, k: int) -> Indices:
        """The samples of global batch `k`, whoever reads them."""
        size = self.size(k)
        return self.order(epoch)[k * self.batch : k * self.batch + size]

    def mine(self, epoch: int, k: int) -> list[Indices]:
        """This reader's samples of each micro-batch of global batch `k`; some may be empty."""
        whole = self.whole(epoch, k)
        return [whole[start:stop] for start, stop in self.cuts(len(whole))]

    def reads(self, epoch: int, k: int) -> list[tuple[Indices, int]]:
        """For each micro-batch of global batch `k`: what this reader reads, and how many of those samples count.

        Where `mine` is empty it reads a dummy, the first sample of the global batch, of which 0 count.
        """
        whole = self.whole(epoch, k)
        cuts = self.cuts(len(whole))
        return [(whole[start:stop], stop - start) if stop > start else (whole[:1], 0) for start, stop in cuts]

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """Where this reader's slice of each micro-batch starts and stops in a global batch of `size` samples."""
        return _cuts(size, self.micro_batches, self.dp_rank, self.dp_size)

    @classmethod
    def of(cls, samples: int, batch: int, mesh: Any = None, **settings: Any) -> Sampler:
        """The share of the rank that `mesh` describes; the whole data set without a mesh."""
        coords = {} if mesh is None else {"dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
        return cls(samples, batch, **coords, **settings)
