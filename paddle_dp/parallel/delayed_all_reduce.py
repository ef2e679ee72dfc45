"""Data parallelism that all-reduces gradients after backward instead of during it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from paddle_dp.parallel.learner import Learner


class LearnerWithDelayedAllReduce(Learner):
    """A learner whose gradients are all-reduced once, after the last backward of a batch; missing ones are zeros.

    paddle.DataParallel exchanges gradients while backward runs (3.3.1), which fails in two cases: under recompute it
    takes the parameters of a backward inside a backward as used twice («parameter … has been ready before»); and with
    absent gradients its find_unused_parameters looks at the last micro-batch only, so that a parameter which an earlier
    one used on one rank is updated on that rank alone.
    """

    @property
    def _may_freeze(self) -> bool:
        return True

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        return self.parallel_model.no_sync()

    def _all_reduce_gradients(self) -> None:
        with self._absent.as_zeros(self._named_trainable), self._waiting_for_exchange():
            fused_allreduce_gradients(self.trainable, None)  # averages, as paddle.DataParallel does
