"""Where a loader's arrays come from: the training process itself (here), or workers that read ahead (`workers`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Protocol

from paddle_dp.data.randomness import globals_kept
from paddle_dp.data.sample import Array, Dataset, read_samples
from paddle_dp.data.sampler import Share

Filled = tuple[Array, Array, int]
"""One micro-batch in arrays: inputs, targets, and how many of the samples count (see Micro)."""


class Source(Protocol):
    """The arrays of one reader's share, batch by batch."""

    def read(self, epoch: int, start: int) -> Iterator[list[Filled]]:
        """The micro-batches of each global batch from `start` on; good until the next batch is asked for."""

    def close(self) -> None: ...


class InProcess:
    """Reads in the training process itself, when asked: nothing to start, wait for or end."""

    def __init__(self, dataset: Dataset, share: Share):
        self.dataset, self.share = dataset, share
        self._keep = nullcontext if hasattr(dataset, "take") else globals_kept

    def read(self, epoch: int, start: int) -> Iterator[list[Filled]]:
        for k in range(start, self.share.batches):
            with self._keep():
                micro_batches = [
                    (*read_samples(self.dataset, indices, self.share.seed, epoch), count)
                    for indices, count in self.share.reads(epoch, k)
                ]
            yield micro_batches

    def close(self) -> None:
        pass
