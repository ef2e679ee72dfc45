"""Exchange between stages, with a second process group for gradients.

Interleaved schedules need it on two ranks, where the previous and the next stage are the same peer and share one queue
of fleet's pipeline group. Senders and receivers alternate in different orders: a gradient would be received as an
activation of the same shape, without an error. Therefore fleet refuses two ranks ("virtual pipeline must run under pp
degree > 2").

On an accelerator the other schedules need it, too: fleet sends and receives on the compute stream, and receives the
next activations before it sends a gradient back, which then waits for a stage that waits for that gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper

from paddle_dp.axes.pipeline.stages import group_of_stages
from paddle_dp.core.data_group import HCG


class GroupsByDirection:
    """A HybridCommunicateGroup with two pipeline groups, one for activations and one for gradients.

    Fleet's engines and their exchange (`initialize_p2p_groups`) use it in place of fleet's. Creating it is collective.
    """

    def __init__(self, hcg: HCG):
        self._hcg, self._group = hcg, hcg.get_pipe_parallel_group()
        self._gradient_group = group_of_stages(tuple(range(hcg.get_pipe_parallel_world_size())), hcg)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hcg, name)

    def get_pipe_parallel_group(self) -> Any:
        return self._group

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Makes the gradients' group the pipeline group within the block."""
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


class AsynchronousP2P(P2pHelper):
    """Fleet's exchange between stages, overlapped with compute: activations and gradients have separate groups and
    streams.

    A stage that receives an activation replies with its gradient, so a micro-batch's sends are complete once as many
    later ones have been sent as there are stages; only then they are waited for. `arrive` waits for requested
    activations just before a stage computes with them, so that an earlier launch, such as a returning gradient, does
    not.
    """

    def __init__(self, groups: GroupsByDirection, helper: P2pHelper):
        super().__init__(helper._use_cache, helper._dynamic_shape)
        self._groups, self._stages = groups, groups.get_pipe_parallel_world_size()
        self._coming: list[Any] = []  # requests
        self._leaving: deque[tuple[list[Any], Any]] = deque()  # requests, and the memory being sent

    def recv_forward(self, pp_first_stage: bool, *_: Any, **more: Any) -> Any:
        if pp_first_stage:
            return None
        self._recv_meta()
        received, _, requests = self._begin(recv_prev=True)
        self._coming += requests
        return received

    def send_forward(
        self, output_tensor: Any, pp_last_stage: bool, *_: Any, skip_check_meta: bool = False, **more: Any
    ) -> None:
        if not pp_last_stage:
            self._send_meta(output_tensor, skip_check_meta=skip_check_meta)
            retained = _retained(output_tensor)  # fleet frees a stage's output once it is sent
            self._leave(self._begin(tensor_send_next=retained)[2], retained)

    def recv_backward(self, pp_last_stage: bool, *_: Any, **more: Any) -> Any:
        if pp_last_stage:
            return None
        with self._groups.gradients():
            if self._dynamic_shape:
                self._recv_meta(reverse=True)
            _, gradient, requests = self._begin(recv_next=True)
        for request in requests:
            request.wait()
        return gradient

    def send_backward(self, input_tensor_grad: Any, pp_first_stage: bool, *_: Any, **more: Any) -> None:
        if pp_first_stage:
            return
        with self._groups.gradients():
            if self._dynamic_shape:
                self._send_meta(input_tensor_grad, reverse=True)
            self._leave(self._begin(tensor_send_prev=input_tensor_grad)[2], input_tensor_grad)

    def arrive(self) -> None:
        """Makes the device, not the host, wait for the requested activations."""
        for request in self._coming:
            request.wait()
        self._coming = []

    def flush(self, most: int = 0) -> None:
        """Makes the device wait for sends until at most `most` are in flight."""
        while len(self._leaving) > most:
            for request in self._leaving.popleft()[0]:
                request.wait()

    def _leave(self, requests: list[Any], tensor: Any) -> None:
        self._leaving.append((requests, tensor))
        self.flush(2 * self._stages)

    def _begin(self, **options: Any) -> tuple[Any, Any, list[Any]]:
        """Starts one of fleet's exchanges. Returns the tensors from the previous and the next stage, and the
        requests."""
        arguments = {
            "tensor_send_next": None,
            "tensor_send_prev": None,
            "recv_prev": False,
            "recv_next": False,
            **options,
        }
        exchanged: tuple[Any, Any, list[Any]] = p2p_communication._p2p_helper(
            **arguments,
            send_recv_meta=self._send_recv_meta,
            batch_p2p_comm=False,
            wait_on_reqs=False,
            dynamic_shape=self._dynamic_shape,
        )
        self._dynamic_cnt += self._dynamic_shape
        return exchanged


def _retained(output: Any) -> Any:
    """A reference to the same memory, which stays when fleet frees the output."""
    return tuple(each.detach() for each in output) if isinstance(output, tuple) else output.detach()
