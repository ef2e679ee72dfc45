"""A model whose branches are dealt to ranks, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.parallel.branches.dealt import deal, drop_others, keepers
from paddle_dp.parallel.branches.join import Join, Turns
from paddle_dp.parallel.branches.observed import DOCS, Seen, observed, outputs_of
from paddle_dp.parallel.branches.wires import Wires
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.precision.amp import cast, read_by

_CLOSE = 1e-4  # relative, of outputs: what comes in another order of sums


@dataclass(frozen=True, kw_only=True)
class Branched:
    """What became of a model: the names of weights that all ranks keep for branches of several (`shared`), and whether
    joins exchange something in backward, too (`exchanges_back`). `layers`: the ids of those of this rank's branches."""

    shared: tuple[str, ...]
    exchanges_back: bool
    layers: frozenset[int] = field(default=frozenset(), compare=False)


def branched(
    model: nn.Layer, samples: Callable[[], Any] | None, wires: Wires, placements: Placements, compare: bool
) -> Branched:
    """Deals the branches of a model, in place. Collective.

    Raises UsageError where a table is not what the model does in a forward of `samples()`, and, with `compare`, where
    the outputs are others than before.
    """
    ranks = wires.ranks
    if samples is None:
        raise UsageError("strategy.branches: there are no samples on which to try the tables.")
    inputs = cast(samples(), read_by(model))
    found, before = observed(model, inputs)
    spread_over(found, len(ranks.ranks))
    shared = drop_others(model, found, ranks, placements)
    turns = Turns(model)
    joins = [Join(seen, wires, turns) for seen in found]
    for seen, join in zip(found, joins, strict=True):
        seen.layer.forward = join
    after = outputs_of(model, inputs, [])
    for one, other in zip(before, after, strict=True):
        apart, largest = (float(x.abs().max()) if x.size else 0.0 for x in (other - one, one))
        if compare and apart > _CLOSE * largest:
            raise UsageError(
                f"strategy.branches: with its branches on {len(ranks.ranks)} ranks {type(model).__name__} gives "
                f"outputs that differ by up to {apart:.2g}, of {largest:.2g}: something else than its chains reads or "
                f"changes what is within a branch ({DOCS})."
            )
    for join in joins:
        join.forms.forget()
    own = [layer for layer, having in keepers(found, len(ranks.ranks)) if ranks.place in having]
    return Branched(
        shared=tuple(shared),
        exchanges_back=any(seen.learned for seen in found),
        layers=frozenset(id(layer) for one in own for layer in one.sublayers(include_self=True)),
    )


def spread_over(found: list[Seen], ranks: int) -> None:
    """Gives each branch its owner. Raises UsageError where a rank has none."""
    for seen in found:
        seen.owners = deal(seen.work, ranks)
    if len({owner for seen in found for owner in seen.owners}) < ranks:
        raise UsageError(too_few([len(seen.chains) for seen in found], ranks))


def too_few(branches: list[int], ranks: int) -> str:
    """What to say where the tables name so many `branches` each, and there are more ranks."""
    most = max(branches, default=0)
    if most < 2:
        return (
            "strategy branches: each `branches` table of the model names one branch alone, and there is nothing to "
            f"deal to {ranks} ranks: name two or more branches in one table ({DOCS})."
        )
    return (
        f"strategy.over={ranks}: there are branches for {most} ranks, for no table of the model names more than "
        f"{most}: set strategy.over={most}, and start a multiple of it; more ranks share the data."
    )
