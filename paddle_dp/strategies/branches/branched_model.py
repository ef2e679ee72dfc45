"""Distributes a model's branches among ranks, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paddle import nn

from paddle_dp.core.placement import Placements
from paddle_dp.core.precision.amp import cast, read_by
from paddle_dp.errors import UsageError
from paddle_dp.strategies.branches.assignment import assign, drop_remote, ranks_of_layers
from paddle_dp.strategies.branches.branch_exchange import BranchExchange
from paddle_dp.strategies.branches.branch_forward import BranchForward, CollectiveOrder
from paddle_dp.strategies.branches.branch_trace import DOCS, BranchTrace, observed, outputs_of

_CLOSE = 1e-4  # relative tolerance of outputs: sums are in another order


@dataclass(frozen=True, kw_only=True)
class Branched:
    """The result for a model. `shared`: names of weights that branches of several ranks share. `exchanges_back`: joins
    also exchange in backward. `layers`: the ids of the layers in this rank's branches."""

    shared: tuple[str, ...]
    exchanges_back: bool
    layers: frozenset[int] = field(default=frozenset(), compare=False)


def branched(
    model: nn.Layer,
    samples: Callable[[], Any] | None,
    exchange: BranchExchange,
    placements: Placements,
    compare: bool,
) -> Branched:
    """Distributes the branches of a model, in place. Collective.

    Raises UsageError if a table does not match a forward of `samples()`, and, with `compare`, if the outputs change.
    """
    ranks = exchange.ranks
    if samples is None:
        raise UsageError("strategy.branches: there are no samples on which to try the tables.")
    inputs = cast(samples(), read_by(model))
    traces, before = observed(model, inputs)
    spread_over(traces, len(ranks.ranks))
    shared = drop_remote(model, traces, ranks, placements)
    turns = CollectiveOrder(model)
    joins = [BranchForward(trace, exchange, turns) for trace in traces]
    for trace, join in zip(traces, joins, strict=True):
        trace.layer.forward = join
    after = outputs_of(model, inputs, [])
    for expected, actual in zip(before, after, strict=True):
        difference, largest = (float(x.abs().max()) if x.size else 0.0 for x in (actual - expected, expected))
        if compare and difference > _CLOSE * largest:
            raise UsageError(
                f"strategy.branches: with its branches on {len(ranks.ranks)} ranks {type(model).__name__} gives "
                f"outputs that differ by up to {difference:.2g}, of {largest:.2g}: something outside its chains "
                f"reads or changes tensors within a branch ({DOCS})."
            )
    for join in joins:
        join.forms.forget()
    layers = [
        layer for layer, having in ranks_of_layers(traces, len(ranks.ranks)) if ranks.group_rank in having
    ]
    return Branched(
        shared=tuple(shared),
        exchanges_back=any(trace.learned for trace in traces),
        layers=frozenset(id(layer) for root in layers for layer in root.sublayers(include_self=True)),
    )


def spread_over(traces: list[BranchTrace], ranks: int) -> None:
    """Gives each branch its owner. Raises UsageError if a rank gets none."""
    for trace in traces:
        trace.owners = assign(trace.work, ranks)
    if len({owner for trace in traces for owner in trace.owners}) < ranks:
        raise UsageError(too_few([len(trace.chains) for trace in traces], ranks))


def too_few(branches: list[int], ranks: int) -> str:
    """The message for tables that name fewer `branches` each than there are ranks."""
    most = max(branches, default=0)
    if most < 2:
        return (
            "strategy.branches: each `branches` table of the model names only one branch, so there is nothing to "
            f"deal to {ranks} ranks: name two or more branches in one table ({DOCS})."
        )
    return (
        f"strategy.over={ranks}: there are branches for {most} ranks, for no table of the model names more than "
        f"{most}: set strategy.over={most}, and start a multiple of it; more ranks share the data."
    )
