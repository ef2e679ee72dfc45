"""What stages send each other, with a second process group for gradients.

Interleaved schedules need that on two ranks: the previous and the next stage are on the same peer there, so both
directions share one queue of fleet's pipeline group. Interleaved senders and receivers alternate in different orders: a
gradient would be received as an activation of the same shape, without an error. Therefore fleet refuses two ranks
(«virtual pipeline must run under pp degree > 2»).

On an accelerator the other schedules need it, too: fleet sends and receives on the stream that computes, and takes in
the next activations before it sends a gradient back, which then waits for a stage that waits for that gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication
from paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication import P2pHelper

from paddle_dp.parallel.hcg import HCG
from paddle_dp.parallel.pipeline.stages import group_of_stages


class GroupsByDirection:
    """A HybridCommunicateGroup with two pipeline groups, one for activations and one for gradients.

    Fleet's engines and their exchange (`initialize_p2p_groups`) use it like fleet's own. Creating it is collective.
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


class AsynchronousP2P(P2pHelper):
    """Fleet's exchange between stages, beside compute: activations and gradients each in a group, and so on a stream,
    of their own.

    Sends are not waited for before they must be: the stage that takes an activation answers with its gradient, so that
    what was sent for one micro-batch is gone when as many others as there are stages were sent after it. Activations
    that were asked for are waited for in `arrive`, when a stage is to compute with them: whatever is launched before
    that, such as a gradient on its way back, does not wait for them.
    """

    def __init__(self, groups: GroupsByDirection, helper: P2pHelper):
        super().__init__(helper._use_cache, helper._dynamic_shape)
        self._groups, self._stages = groups, groups.get_pipe_parallel_world_size()
        self._coming: list[Any] = []  # requests
        self._leaving: deque[tuple[list[Any], Any]] = deque()  # with the memory that is sent

    def recv_forward(self, pp_first_stage: bool, *_: Any, **more: Any) -> Any:
        if pp_first_stage:
            return None
        self._recv_meta()
        given, _, requests = self._begin(recv_prev=True)
        self._coming += requests
        return given

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
        """Makes the device, not the host, wait for the activations that were asked for."""
        for request in self._coming:
            request.wait()
        self._coming = []

    def flush(self, most: int = 0) -> None:
        """The same for sends, until at most so many are under way."""
        while len(self._leaving) > most:
            for request in self._leaving.popleft()[0]:
                request.wait()

    def _leave(self, requests: list[Any], tensor: Any) -> None:
        self._leaving.append((requests, tensor))
        self.flush(2 * self._stages)

    def _begin(self, **options: Any) -> tuple[Any, Any, list[Any]]:
        """One of fleet's exchanges, which is not waited for: what comes from the previous and the next stage, and the
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
    """The same memory, which stays when the output's is freed."""
    return tuple(each.detach() for each in output) if isinstance(output, tuple) else output.detach()
