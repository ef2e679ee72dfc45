"""Records the collectives that the script itself calls, with the first numbers of their tensors.

Collectives of paddle.DataParallel are not recorded: they run in C++.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from paddle_dp.audit.events import EventJournal, Exchanged
from paddle_dp.audit.hooks.source_line import caller, here
from paddle_dp.audit.hooks.watch import wrap
from paddle_dp.gloo.originals import CompletedTask

SHOWN = 4  # numbers of a tensor that are recorded
COMMUNICATION = os.path.join("paddle", "distributed", "communication")
MAX_SIZE = 1 << 16  # elements of a tensor of which numbers are recorded
# Name of a collective, in paddle.distributed and its `stream`: the positions of this rank's payload and of the target
# among its parameters.
POSITIONS: dict[str, tuple[int | None, int | None]] = {
    "all_reduce": (0, None), "reduce": (0, None), "broadcast": (0, None), "barrier": (None, None),
    "all_gather": (1, 0), "gather": (0, 1), "scatter": (1, 0), "reduce_scatter": (1, 0), "alltoall": (1, 0),
    "alltoall_single": (1, 0),
}  # fmt: skip
# Collectives of objects are made of the ones above, also on one process; a message needs a second rank everywhere.
ORIGINAL = (
    "all_gather_object", "broadcast_object_list", "scatter_object_list", "send", "recv", "isend", "irecv",
)  # fmt: skip


def watch_collectives(journal: EventJournal, alone: bool) -> None:
    """Wraps the public collectives of `paddle.distributed` and `paddle.distributed.stream`.

    `alone`: on one process without a group, where Paddle's collectives raise, each has its effect for one rank:
    all_reduce changes nothing, all_gather gives a list of one, or fills the script's.
    """
    for module in (dist, dist.stream):
        for name in (*POSITIONS, *ORIGINAL):
            if hasattr(module, name):
                wrap(module, name, partial(_note_collective, journal, name, alone))


def let_fleet_run_alone() -> None:
    """Makes `fleet.distributed_model` return the model itself on one process.

    Paddle 3.3.1 accepts only pipelined models there, and raises a bare AssertionError for others.
    """

    def model_alone(distributed: Callable[[Any], Any], model: Any) -> Any:
        return distributed(model) if isinstance(model, PipelineLayer) else model

    wrap(fleet, "distributed_model", model_alone)


def _note_collective(
    journal: EventJournal, name: str, alone: bool, collective: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    signature = inspect.signature(collective)
    values, names = signature.bind(*args, **kwargs).arguments, [*signature.parameters]
    sent, received = (
        None if at is None else values.get(names[at]) for at in POSITIONS.get(name, (None, None))
    )
    if COMMUNICATION not in caller():  # all_reduce calls stream.all_reduce
        journal.write(Exchanged(collective=name, values=_first_numbers(sent), where=here()))
    if not alone or name in ORIGINAL:
        return collective(*args, **kwargs)
    if received is not None:
        _receive(sent, received)
    return CompletedTask()


def _receive(sent: Any, received: Any) -> None:
    """Copies the tensor or list that one rank sends into the tensor or list that it receives. As in Paddle, an empty
    list gets new tensors, and no gradient goes through."""
    pieces = list(sent) if isinstance(sent, list | tuple) else [sent]
    if isinstance(received, paddle.Tensor):
        received = [received]
    elif not received:
        received += [paddle.empty_like(piece) for piece in pieces]
    with paddle.no_grad():
        for target, piece in zip(received, pieces, strict=True):
            paddle.assign(piece, target)


def _first_numbers(payload: Any) -> tuple[float, ...]:
    """The first numbers of a tensor; none of one that is large."""
    if not isinstance(payload, paddle.Tensor) or not payload._is_initialized() or payload.size > MAX_SIZE:
        return ()
    return tuple(map(float, payload.detach().astype("float64").numpy().reshape(-1)[:SHOWN]))
