"""Which collectives the script calls itself, and the first numbers that it gives; DataParallel's own are not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_dp.audit.events import Exchanged, Journal
from paddle_dp.audit.hooks.place import here

SHOWN = 4  # numbers of a tensor that are written down
# name: where among the arguments the tensor stands that is given
GIVEN = {
    "all_reduce": 0, "reduce": 0, "broadcast": 0, "all_gather": 1, "all_gather_object": 1, "reduce_scatter": 0,
    "gather": 0, "alltoall": 0, "barrier": None,
}  # fmt: skip


def watch_collectives(journal: Journal, alone: bool) -> None:
    """Wraps the public collectives of `paddle.distributed`.

    `alone`: on one process there is no group, and Paddle's collectives raise; there each is what it means for one
    rank: nothing for all_reduce, a list of one for all_gather.
    """
    for name, place in GIVEN.items():
        if hasattr(dist, name):
            setattr(dist, name, _watched(journal, name, place, alone))


def let_fleet_run_alone() -> None:
    """On one process `fleet.distributed_model` takes pipelined models only (Paddle 3.3.1: a bare AssertionError).

    There the model itself is what it means for one rank, as in earlier versions.
    """
    distributed = fleet.distributed_model

    def model_alone(model: Any) -> Any:
        return distributed(model) if isinstance(model, PipelineLayer) else model

    fleet.distributed_model = model_alone


def _watched(journal: Journal, name: str, place: int | None, alone: bool) -> Callable[..., Any]:
    collective = getattr(dist, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        given = _given(place, args, kwargs)
        shape, values = _numbers(given)
        journal.write(Exchanged(collective=name, shape=shape, values=values, where=here()))
        if not alone:
            return collective(*args, **kwargs)
        if name.startswith("all_gather"):
            target = args[0] if args else next(iter(kwargs.values()))
            target.append(given.clone() if isinstance(given, paddle.Tensor) else given)
        return None

    return watched


def _given(place: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if place is None:
        return None
    if place < len(args):
        return args[place]
    return kwargs.get("tensor", kwargs.get("obj"))


def _numbers(given: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if not isinstance(given, paddle.Tensor) or not given._is_initialized():
        return (), ()
    shape = tuple(given.shape)
    if int(np.prod(shape)) > 1 << 16:
        return shape, ()
    values = given.detach().astype("float64").numpy().reshape(-1)[:SHOWN]
    return shape, tuple(map(float, values))
