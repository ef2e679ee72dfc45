"""Optimizer states that wait in host memory while the model computes, and are on the device for the update only."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_dp.parallel.memory import states


class Waiting:
    """Moves an optimizer's states to the host and back (`offload`); in between their tensors are empty.

    Forward and backward, when activations take most of the device, have its memory to themselves; the price is one trip
    of the states in each direction an update. Nothing is gained where device and host are one.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._away: list[tuple[paddle.Tensor, paddle.Tensor, Any]] = []

    def leave(self) -> None:
        """Sends the states to the host. Does nothing when they are there, or not made yet."""
        if self._away:
            return
        for tensor in states(self.optimizer):
            place = tensor.place
            self._away.append((tensor, tensor.cpu() if place.is_gpu_place() else tensor.clone(), place))
            tensor._clear_data()

    def back(self) -> None:
        """Brings them to where they were. Does nothing when they are here."""
        for tensor, host, place in self._away:
            (paddle.to_tensor(host, place=place) if place.is_gpu_place() else host)._share_buffer_to(tensor)
        self._away.clear()
