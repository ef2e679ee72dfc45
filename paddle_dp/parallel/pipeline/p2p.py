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

from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper

from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.pipeline.stages import group_of_stages


class GroupsByDirection:
    """A HybridCommunicateGroup with two pipeline groups: which of them it names, the direction decides.

    Fleet's engines and their exchange (`initialize_p2p_groups`) take it as they take fleet's own. Collective where it
    is made.
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
    """Fleet's exchange between stages, with gradients in a group of their own."""

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
