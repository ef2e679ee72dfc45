"""Data parallelism whose gradients are all-reduced behind backward, and not beside it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from paddle_dp.parallel.learner import Learner


class LearnerWithDelayedAllReduce(Learner):
    """A learner whose gradients are all-reduced once, after the last backward of a batch; what a rank lacks is zeros.

    Two things need it, since paddle.DataParallel exchanges gradients while backward runs (3.3.1): a backward inside a
    backward (recompute), whose parameters it takes for used twice, «parameter … has been ready before»; and gradients
    that are absent. Its own find_unused_parameters looks at the last micro-batch only: what an earlier one used on one
    rank is updated on that rank alone.
    """

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        return self.parallel_model.no_sync()

    def _all_reduce_gradients(self) -> None:
        with self._absent.as_zeros(self.named_parameters(trainable=True)), self._waiting_for_exchange():
            fused_allreduce_gradients(self.trainable, None)  # averages, as paddle.DataParallel does
