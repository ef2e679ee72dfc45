"""Epochs whose global batches grow: `train.batch_ramp`.

Update u of a training takes min(batch, start + increment · (u // every)) samples (Megatron's `--rampup-batch-size`, by
updates). An epoch is cut into global batches from its first sample on, the last one short, as without a ramp; so where
batch k of an epoch begins follows from the sizes of all updates before it, which are numbers of the recipe. Nothing is
remembered: a sampler computes the same cuts on any number of ranks, and after a resume. From the first epoch that
begins with full batches on, all epochs are alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paddle_dp.recipe.schema import BatchRamp


class RampedEpochs:
    """The epochs of `samples` samples in which global batches are not of `batch` samples yet."""

    def __init__(self, samples: int, batch: int, ramp: BatchRamp, drop_last: bool):
        self._samples, self._batch, self._ramp, self._drop_last = samples, batch, ramp, drop_last
        self._bounds: list[NDArray[np.int64]] = []
        self._updates = [0]  # before each epoch

    def bounds(self, epoch: int) -> NDArray[np.int64] | None:
        """Where the global batches of an epoch begin and the last one ends, int64 [batches + 1], in samples; None if
        the epoch begins with full batches."""
        while len(self._bounds) <= epoch:
            if self._ramp.size(self._updates[-1], self._batch) == self._batch:
                return None
            self._bounds.append(self._next())
            self._updates.append(self._updates[-1] + len(self._bounds[-1]) - 1)
        return self._bounds[epoch]

    def epoch_of(self, update: int) -> tuple[int, int]:
        """The epoch of an update, counted from 0, and the updates before that epoch; an update after the ramp's epochs
        is counted into the first epoch that follows them."""
        epoch = 0
        while self.bounds(epoch) is not None and self._updates[epoch + 1] <= update:
            epoch += 1
        return epoch, self._updates[epoch]

    def _next(self) -> NDArray[np.int64]:
        most = -(-self._samples // self._ramp.start)  # batches of an epoch
        sizes = [self._ramp.size(self._updates[-1] + number, self._batch) for number in range(most)]
        ends = np.cumsum(sizes)
        count = int(np.searchsorted(ends, self._samples, side="right"))  # full batches
        bounds = [0, *ends[:count].tolist()]
        if bounds[-1] < self._samples and not self._drop_last:
            bounds.append(self._samples)
        return np.array(bounds, dtype=np.int64)


@lru_cache(maxsize=8)
def ramped_epochs(samples: int, batch: int, ramp: BatchRamp, drop_last: bool) -> RampedEpochs:
    """The same object for the same numbers, which has computed them once."""
    return RampedEpochs(samples, batch, ramp, drop_last)
