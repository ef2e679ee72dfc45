"""A learner for a rank's branches and what all ranks have."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_dp.parallel.branches.branched_model import Branched
from paddle_dp.parallel.data_group import PaddleGroup
from paddle_dp.parallel.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.parallel.exchange.gradient_exchange import CompositeExchange, GradientExchange
from paddle_dp.parallel.exchange.pushed_gradients import PushedGradients
from paddle_dp.parallel.hybrid import HybridLearner


@dataclass(kw_only=True)
class BranchesLearner(HybridLearner):
    """A learner for this rank's branches and what all ranks have.

    While backward runs gradients are added up: over `data_ranks`, who have the same branches, and those of weights that
    branches of several ranks share (`branched.shared`) over `every_rank`.
    """

    branched: Branched
    data_ranks: PaddleGroup
    every_rank: PaddleGroup

    def _make_overlapped_exchange(self) -> GradientExchange | None:
        shared = set(self.branched.shared)
        kinds: dict[bool, list[int]] = {False: [], True: []}
        indices = {id(parameter): place for place, parameter in enumerate(self.trainable)}
        for name, parameter in self._named_trainable:
            kinds[name in shared].append(indices[id(parameter)])
        exchanges: list[tuple[GradientExchange, Sequence[int]]] = []
        if len(self.data_ranks.ranks) > 1:
            exchanges.append((self._over(self.data_ranks, kinds[False], "gradients"), kinds[False]))
        if shared:
            exchanges.append((self._over(self.every_rank, kinds[True], "shared"), kinds[True]))
        return CompositeExchange(exchanges) if exchanges else None

    def _over(self, ranks: PaddleGroup, indices: Sequence[int], channel: str) -> GradientExchange:
        parameters = [self.trainable[place] for place in sorted(indices)]
        if self.mesh.device == "cpu":
            keepers = [ranks.ranks] * len(parameters)
            return PushedGradients(ranks.ranks, ranks.rank, parameters, keepers, channel=channel)
        # Ranks come to joins and to shared weights in different orders: their collectives must not wait for each other.
        beside = channel != "shared" or not self.branched.exchanges_back
        return BucketedGradients(ranks.group, parameters, overlapped=beside)

    def _all_reduce_gradients(self) -> None:
        if self._overlapped is not None:
            self._overlapped.finish()

    @property
    def counts_bytes(self) -> bool:
        return True

    def _sum_over_readers(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Over the ranks that have the same branches."""
        return self.data_ranks.sum_tensor(tensor)

    def _differing_layers(self) -> Container[int]:
        return self.branched.layers

    def _same_buffers(self) -> Sequence[Any]:
        return (self.data_ranks.group,) if len(self.data_ranks.ranks) > 1 else ()
