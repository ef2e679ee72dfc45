"""Global batches as all data ranks together read them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paddle_dp.batch import leaves
from paddle_dp.data import Loader, Sampler


def rows(loader: Loader, epoch: int = 0, start: int = 0) -> list[Any]:
    """Everything that a reading gives, in plain numbers."""
    return [
        (batch.index, batch.samples, [(m.inputs.tolist(), m.targets.tolist(), m.samples) for m in batch.micro_batches])
        for batch in loader.read(epoch, start)
    ]  # fmt: skip


def global_batches(
    data: Any, sampler: Sampler, dp_size: int = 1, start: int = 0, epochs: int = 2, **settings: Any
) -> list[list[np.ndarray]]:
    """The arrays of each global batch of some epochs, from all data ranks in the order of their micro-batches.
    `settings` are the loader's."""
    pieces: dict[tuple[int, int], dict[tuple[int, int], list[np.ndarray]]] = {}
    for dp_rank in range(dp_size):
        with Loader(data, replace(sampler, dp_rank=dp_rank, dp_size=dp_size), **settings) as loader:
            for epoch in range(epochs):
                for batch in loader.read(epoch, start):
                    rows = pieces.setdefault((epoch, batch.index), {})
                    for each in batch.micro_batches:
                        if each.samples:
                            arrays = leaves((each.inputs, each.targets))
                            rows[each.first, dp_rank] = [array.numpy() for array in arrays]
    return [
        [np.concatenate(arrays) for arrays in zip(*(rows[at] for at in sorted(rows)), strict=True)]
        for rows in pieces.values()
    ]
