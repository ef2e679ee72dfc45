"""Reads data: which rank reads which samples (`sampler`, pure arithmetic), and batches of tensors (`loader`).

The data sets themselves are in `datasets/`, the coordinates of ranks in `mesh/`, and what a batch is used for in
`parallel/`.
"""

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.data.loader import Loader
from paddle_dp.data.sampler import Sampler

__all__ = ["Batch", "Loader", "MicroBatch", "Sampler"]
