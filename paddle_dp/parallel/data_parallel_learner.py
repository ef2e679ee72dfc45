"""Data parallelism with our own exchange of gradients while backward runs, where paddle.DataParallel's does not do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import paddle.distributed as dist

from paddle_dp.parallel.consistency import check_gradients
from paddle_dp.parallel.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.parallel.exchange.gradient_exchange import GradientExchange
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.learner import Learner


@dataclass(kw_only=True)
class DataParallelLearner(Learner):
    """A learner whose gradients are added up by a `GradientExchange`; paddle.DataParallel only makes weights equal.

    Its reducer (3.3.1) waits for each all-reduce over gloo, so that nothing is hidden behind backward on CPUs. On
    accelerators too it fails in two cases: under recompute it takes the parameters of a backward inside a backward as
    used twice («parameter … has been ready before»); and with absent gradients its find_unused_parameters looks at the
    last micro-batch only, so that a parameter which an earlier one used on one rank is updated on that rank alone.
    With `absent`, a gradient that a rank lacks counts as zeros here, and one that all lack stays absent; else it is an
    error.
    """

    absent: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = list(range(self.mesh.ranks))
        self._ahead: GradientExchange
        if self.mesh.device == "cpu":
            keepers = [ranks] * len(self.trainable)
            self._ahead = PushedGradients(ranks, self.mesh.rank, self.trainable, keepers)
        else:
            self._ahead = BucketedGradients(dist.new_group(ranks), self.trainable)

    @property
    def _may_freeze(self) -> bool:
        return self.absent

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        return self.parallel_model.no_sync()

    def _exchanging(self, last: bool) -> AbstractContextManager[None]:
        return self._ahead.backward(last)

    def _all_reduce_gradients(self) -> None:
        without = {id(self.trainable[place]) for place in self._ahead.finish()}
        if not self.absent:
            lacking = [name for name, parameter in self._named_trainable if id(parameter) in without]
            check_gradients(lacking, self.mesh, first=not self._gradients_checked)
            self._gradients_checked = True
