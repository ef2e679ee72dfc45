"""Two ways between two stages that hold several parts each: forwards must not be mistaken for gradients.

On two ranks the stage before and the stage after are one and the same, so both directions share one queue of fleet's
pipeline group. Under interleaved the sender and the receiver do not take turns alike: an activation is received where a
gradient was sent, of the same shape, and nobody notices. Fleet refuses two ranks for it («virtual pipeline must run
under pp degree > 2»); a second group for gradients is all that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle.distributed as dist
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper


class Lanes(P2pHelper):
    """Fleet's exchange between stages, with gradients in a group of their own. Collective where it is made."""

    def __init__(self, seats: Any, helper: P2pHelper):
        super().__init__(helper._use_cache, helper._dynamic_shape)
        self._view = p2p_communication._hcg = _Seats(seats, _gradient_group(seats))

    def recv_backward(self, *args: Any, **more: Any) -> Any:
        with self._view.gradients():
            return super().recv_backward(*args, **more)

    def send_backward(self, *args: Any, **more: Any) -> Any:
        with self._view.gradients():
            return super().send_backward(*args, **more)

    def send_backward_recv_backward(self, *args: Any, **more: Any) -> Any:
        with self._view.gradients():
            return super().send_backward_recv_backward(*args, **more)


class _Seats:
    """A HybridCommunicateGroup as fleet's exchange sees it: which pipeline group it is, the direction decides."""

    def __init__(self, seats: Any, gradient_group: Any):
        self._seats, self._group = seats, seats.get_pipe_parallel_group()
        self._gradient_group = gradient_group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seats, name)

    def get_pipe_parallel_group(self) -> Any:
        return self._group

    @contextmanager
    def gradients(self) -> Iterator[None]:
        self._group, activations = self._gradient_group, self._group
        try:
            yield
        finally:
            self._group = activations


def _gradient_group(seats: Any) -> Any:
    """A second group of this rank's pipeline. Collective: every rank makes every pipeline's."""
    mine = None
    for pipeline in seats.topology().get_comm_list("pipe"):
        group = dist.new_group(pipeline)
        mine = group if dist.get_rank() in pipeline else mine
    return mine
