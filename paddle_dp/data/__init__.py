"""Reads data: `sampler` assigns samples to ranks by pure arithmetic, `loader` makes batches of tensors.

`datasets/` has the data sets, `mesh/` the coordinates of ranks, and `learner/` consumes the batches.
"""

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.data.loader import Loader
from paddle_dp.data.sampler import Sampler

__all__ = ["Batch", "Loader", "MicroBatch", "Sampler"]
