"""Data parallelism on CPUs, where gradients are exchanged while backward runs by pushes from rank to rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from paddle_dp.parallel.consistency import check_gradients
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.learner import Learner


@dataclass(kw_only=True)
class PushingLearner(Learner):
    """A learner whose gradients are summed by `PushedGradients`; paddle.DataParallel only makes weights equal.

    Its reducer waits for each all-reduce over gloo, so that nothing is hidden behind backward (3.3.1). With `absent`, a
    gradient that a rank lacks counts as zeros, and one that all lack stays absent.
    """

    absent: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = list(range(self.mesh.ranks))
        self._pushed = PushedGradients(ranks, self.mesh.rank, self.trainable, [ranks] * len(self.trainable))

    @property
    def _may_freeze(self) -> bool:
        return self.absent

    @contextmanager
    def _no_sync_and_push(self, last: bool) -> Iterator[None]:
        with self.parallel_model.no_sync(), self._pushed.backward(last):
            yield

    def _no_sync(self, more_to_come: bool) -> AbstractContextManager[Any]:
        return self._no_sync_and_push(not more_to_come)

    def _all_reduce_gradients(self) -> None:
        without = {id(self.trainable[place]) for place in self._pushed.finish()}
        if not self.absent:
            lacking = [name for name, parameter in self._named_trainable if id(parameter) in without]
            check_gradients(lacking, self.mesh, first=not self._gradients_checked)
            self._gradients_checked = True
