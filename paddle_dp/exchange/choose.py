"""Chooses the exchange of gradients for a model that every rank holds whole.

In the order of choice:

| exchange             | on CPUs                    | on accelerators | chosen                                      |
|----------------------|----------------------------|-----------------|---------------------------------------------|
| `PaddleReducer`      | backward waits             | overlapped      | `bucketed`; `auto` on accelerators          |
| `CompressedExchange` | over pushes                | over buckets    | `compressed`: the recipe's `compress`       |
| `BucketedGradients`  | after backward             | after backward  | `after`                                     |
| `BucketedGradients`  | backward waits             | overlapped      | `per_parameter`; `bucketed` with absent     |
|                      |                            |                 | gradients                                   |
| `PushedGradients`    | pushed while backward runs | –               | `pushed`; `auto` on CPUs                    |

Other layouts compose theirs: `AxesExchange` (axes/axes_exchange.py), `branch_gradient_exchange`
(strategies/branches/branched_model.py), `server_exchange` (strategies/parameter_server/served.py), `CopiesExchange`
(strategies/replicas/replicas.py).

PaddleReducer fails in two cases (3.3.1), where our buckets replace it: under recompute it reports the parameters of a
backward inside a backward as used twice ("parameter … has been ready before"); and with absent gradients its
find_unused_parameters checks the last micro-batch only, so a parameter that an earlier one used on one rank is updated
on that rank alone. Over gloo it waits for each all-reduce, so that nothing overlaps with backward on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.buckets import BUCKET_PER_GRADIENT, SINGLE_BUCKET, BucketSizes
from paddle_dp.exchange.compressed import compressed_exchange
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.paddle_reducer import PaddleReducer
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.exchange.residuals import Residuals
from paddle_dp.mesh import Mesh, new_group
from paddle_dp.units import Compress


@dataclass(frozen=True, kw_only=True)
class ExchangeSettings:
    """`kind`: the recipe's word, or `compressed`; `sizes`: of buckets; `compress`: the compression of gradients;
    `absent`: some ranks may lack a gradient, which then counts as zeros."""

    kind: str = "auto"
    sizes: BucketSizes | None = None
    compress: Compress = field(default_factory=Compress)
    absent: bool = False

    def kind_on(self, device: str) -> str:
        """The kind on a device, never `auto`."""
        if self.kind != "auto":
            return self.kind
        return "pushed" if device == "cpu" else "bucketed"

    def by_reducer(self, device: str) -> bool:
        """Whether paddle.DataParallel exchanges the gradients, and so must wrap the model."""
        return self.kind_on(device) == "bucketed" and not self.absent


def choose_exchange(
    settings: ExchangeSettings,
    placed: PlacedModel,
    wrapper: nn.Layer | None = None,
    counted_late: bool = False,
) -> GradientExchange:
    """Creates the exchange of a model's gradients over all ranks. Collective.

    `wrapper`: the model in paddle.DataParallel, if `settings.by_reducer`. `counted_late`: the loss's count is known
    only after the forward.
    """
    parameters, mesh = placed.trainable, placed.mesh
    kind = settings.kind_on(mesh.device)
    if settings.by_reducer(mesh.device):
        return PaddleReducer(wrapper, parameters, mesh)
    if kind == "compressed":
        exchange = compressed_exchange(
            settings.compress, placed, counted_late, partial(fastest_exchange, mesh)
        )
    elif kind in ("after", "per_parameter"):
        alone = kind == "per_parameter"
        sizes = BUCKET_PER_GRADIENT if alone else SINGLE_BUCKET
        exchange = _bucketed(mesh, parameters, sizes=sizes, overlapped=alone)
    elif kind == "bucketed":
        exchange = _bucketed(mesh, parameters, sizes=settings.sizes)
    else:
        exchange = fastest_exchange(mesh, parameters)
    exchange.missing = "zeros" if settings.absent else "raise"
    return exchange


def fastest_exchange(
    mesh: Mesh,
    tensors: Sequence[paddle.Tensor],
    channel: str = "gradients",
    reduce_dtype: str | None = None,
    residuals: Residuals | None = None,
) -> GradientExchange:
    """Creates the fastest exchange of the gradients of `tensors` on this device. Collective."""
    if mesh.device != "cpu":
        return _bucketed(mesh, tensors, reduce_dtype=reduce_dtype, residuals=residuals)
    ranks = list(range(mesh.ranks))
    destinations = [ranks] * len(tensors)
    return PushedGradients(
        ranks,
        mesh.rank,
        tensors,
        destinations,
        reduce_dtype=reduce_dtype,
        residuals=residuals,
        channel=channel,
    )


def _bucketed(mesh: Mesh, tensors: Sequence[paddle.Tensor], **settings: Any) -> GradientExchange:
    """Uses a separate group on accelerators, so that other collectives do not delay the buckets."""
    if mesh.device != "cpu":
        return BucketedGradients(new_group(range(mesh.ranks)), list(tensors), **settings)
    waiting = partial(mesh.waiting, "the exchange of gradients")
    return BucketedGradients(dist.get_group(0), list(tensors), waiting=waiting, **settings)
