"""Records the collectives that the script itself calls, with the first numbers of their tensors.

Collectives of paddle.DataParallel are not recorded: they run in C++.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_dp.audit.events import EventJournal, Exchanged
from paddle_dp.audit.hooks.source_line import here
from paddle_dp.audit.hooks.watch import wrap

SHOWN = 4  # numbers of a tensor that are recorded
MAX_SIZE = 1 << 16  # elements of a tensor of which numbers are recorded
# name of a collective: position of its input tensor among the arguments
INPUT = {
    "all_reduce": 0, "reduce": 0, "broadcast": 0, "all_gather": 1, "all_gather_object": 1, "reduce_scatter": 0,
    "gather": 0, "alltoall": 0, "barrier": None,
}  # fmt: skip


def watch_collectives(journal: EventJournal, alone: bool) -> None:
    """Wraps the public collectives of `paddle.distributed`.

    `alone`: on one process without a group, where Paddle's collectives raise, each has its effect for one rank:
    all_reduce changes nothing, all_gather gives a list of one.
    """
    for name, position in INPUT.items():
        if hasattr(dist, name):
            wrap(dist, name, partial(_note_collective, journal, name, position, alone))


def let_fleet_run_alone() -> None:
    """Makes `fleet.distributed_model` return the model itself on one process.

    Paddle 3.3.1 accepts only pipelined models there, and raises a bare AssertionError for others.
    """

    def model_alone(distributed: Callable[[Any], Any], model: Any) -> Any:
        return distributed(model) if isinstance(model, PipelineLayer) else model

    wrap(fleet, "distributed_model", model_alone)


def _note_collective(
    journal: EventJournal,
    name: str,
    position: int | None,
    alone: bool,
    collective: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    payload = _input(position, args, kwargs)
    journal.write(Exchanged(collective=name, values=_first_numbers(payload), where=here()))
    if not alone:
        return collective(*args, **kwargs)
    if name.startswith("all_gather"):
        target = args[0] if args else next(iter(kwargs.values()))
        target.append(payload.clone() if isinstance(payload, paddle.Tensor) else payload)
    return None


def _input(position: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if position is None:
        return None
    if position < len(args):
        return args[position]
    return kwargs.get("tensor", kwargs.get("obj"))


def _first_numbers(payload: Any) -> tuple[float, ...]:
    """The first numbers of a tensor; none of one that is large."""
    if not isinstance(payload, paddle.Tensor) or not payload._is_initialized() or payload.size > MAX_SIZE:
        return ()
    return tuple(map(float, payload.detach().astype("float64").numpy().reshape(-1)[:SHOWN]))
