"""Offloads optimizer states to host memory between updates."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_dp.parallel.memory import states


class Offload:
    """Moves an optimizer's states to the host and back; meanwhile their tensors have no memory.

    The states take no device memory during forward and backward, when activations take most of it. The price is a copy
    of the states in each direction per update. On a CPU it gains nothing.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._on_host: list[tuple[paddle.Tensor, paddle.Tensor, Any]] = []

    def to_host(self) -> None:
        """Copies the states to the host and frees them on the device; does nothing if they are there already."""
        if self._on_host:
            return
        for tensor in states(self.optimizer):
            place = tensor.place
            self._on_host.append((tensor, tensor.clone() if place.is_cpu_place() else tensor.cpu(), place))
            tensor._clear_data()

    def to_device(self) -> None:
        """Copies the states back to their device; does nothing if they are there already."""
        for tensor, host, place in self._on_host:
            (host if place.is_cpu_place() else paddle.to_tensor(host, place=place))._share_buffer_to(tensor)
        self._on_host.clear()
