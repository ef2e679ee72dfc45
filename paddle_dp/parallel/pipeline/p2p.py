"""A second process group for gradients, so that interleaved schedules work on two ranks.

On two ranks the previous and the next stage are on the same peer, so both directions share one queue of fleet's
pipeline group. Interleaved senders and receivers alternate in different orders: a gradient would be received as an
activation of the same shape, without an error. Therefore fleet refuses two ranks («virtual pipeline must run under pp
degree > 2»).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper

from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.pipeline.stages import group_of_stages


class GroupsByDirection:
    """A HybridCommunicateGroup with two pipeline groups, one for activations and one for gradients.

    Fleet's engines and their exchange (`initialize_p2p_groups`) use it like fleet's own. Creating it is collective.
    """

    def __init__(self, hcg: HCG):
        self._hcg, self._group = hcg, hcg.get_pipe_parallel_group()
        self._gradient_group = group_of_stages((0, 1), hcg)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hcg, name)

    def get_pipe_parallel_group(self) -> Any:
        return self._group

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Inside, the pipeline group is the one for gradients."""
        self._group, activations = self._gradient_group, self._group
        try:
            yield
        finally:
            self._group = activations


class P2PWithGradGroup(P2pHelper):
    """Fleet's exchange between stages, with gradients in a separate group."""

    def __init__(self, groups: GroupsByDirection, helper: P2pHelper):
        super().__init__(helper._use_cache, helper._dynamic_shape)
        self._groups = groups

    def recv_backward(self, *args: Any, **more: Any) -> Any:
        with self._groups.gradients():
            return super().recv_backward(*args, **more)

    def send_backward(self, *args: Any, **more: Any) -> Any:
        with self._groups.gradients():
            return super().send_backward(*args, **more)

    def send_backward_recv_backward(self, *args: Any, **more: Any) -> Any:
        with self._groups.gradients():
            return super().send_backward_recv_backward(*args, **more)
