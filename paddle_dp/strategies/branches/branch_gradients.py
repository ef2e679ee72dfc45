"""The exchange of gradients of a model whose branches are on different ranks."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_dp.core.data_group import PaddleGroup
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.gradient_exchange import CompositeExchange, GradientExchange
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.strategies.branches.branched_model import Branched


def branch_gradient_exchange(
    placed: PlacedModel, branched: Branched, data_ranks: PaddleGroup, every_rank: PaddleGroup
) -> GradientExchange:
    """Creates the exchange that sums gradients over `data_ranks`, which have the same branches, and over `every_rank`
    for weights that branches of several ranks share (`branched.shared`)."""
    shared = set(branched.shared)
    indices: dict[bool, list[int]] = {False: [], True: []}
    index_of = {id(parameter): index for index, parameter in enumerate(placed.trainable)}
    for name, parameter in placed.named_trainable:
        indices[name in shared].append(index_of[id(parameter)])
    exchanges: list[tuple[GradientExchange, Sequence[int]]] = []
    if len(data_ranks.ranks) > 1:
        local = _over(data_ranks, placed, indices[False], "gradients", overlapped=True)
        exchanges.append((local, indices[False]))
    if shared:
        # Ranks reach joins and shared weights in different orders, so their collectives could deadlock.
        overlapped = not branched.exchanges_back
        exchanges.append((_over(every_rank, placed, indices[True], "shared", overlapped), indices[True]))
    return CompositeExchange(exchanges)


def _over(
    ranks: PaddleGroup, placed: PlacedModel, indices: Sequence[int], channel: str, overlapped: bool
) -> GradientExchange:
    parameters = [placed.trainable[index] for index in sorted(indices)]
    if placed.mesh.device == "cpu":
        destinations = [ranks.ranks] * len(parameters)
        return PushedGradients(ranks.ranks, ranks.rank, parameters, destinations, channel=channel)
    return BucketedGradients(ranks.group, parameters, overlapped=overlapped)
