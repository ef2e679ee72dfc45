"""The contract of weight synchronization: how ranks come to the weights of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle

from paddle_dp.parallel.consistency import Replica
from paddle_dp.parallel.extra_state import ExtraState, SavedExtraState
from paddle_dp.parallel.placed_model import NamedTensors, PlacedModel
from paddle_dp.parallel.update_mode import UpdateMode

NOTHING = nullcontext()
States = Iterable[tuple[str, paddle.Tensor, paddle.Tensor]]
"""Optimizer states: name, tensor, and the parameter."""


class WeightSync:
    """Every rank makes the same step, so nothing is sent. Strategies with other weights have subclasses.

    `mode`: how updates are computed. `collective_forward`: a forward gathers weights from other ranks (ZeRO-3).
    `diverged`: the ranks' weights differ now. `overlaps`: new weights may still travel after `publish`, because the
    next forward waits for them layer by layer; whoever sets it calls `wait` before anybody else reads a parameter.
    `description`: a part of a sentence on what ranks exchange, unless it is gradients.
    """

    collective_forward: bool = False
    diverged: bool = False
    description: str = ""

    def __init__(self, mode: UpdateMode):
        self.mode, self.overlaps = mode, False
        self.after_equal: Callable[[], None] = lambda: (
            None
        )  # a learner's checks, once weights are equal again

    def begin_update(self, number: int) -> UpdateMode:
        """Before the forward of update `number` (from 1). Collective."""
        return self.mode

    def publish(self) -> None:
        """After the optimizer's step: sends the new weights, which arrive until `wait`. Collective."""

    def wait(self) -> None:
        """Waits, on the device, until this rank's parameters have their last values."""

    def share(self) -> None:
        """After the owners gave their parameters other values: sends them to the ranks that hold copies. Collective."""

    def forward_only(self) -> AbstractContextManager[Any]:
        """Around a forward without backward."""
        return NOTHING

    def end_pass(self, backward: bool) -> None:
        """After a forward or a backward of a pipeline's stage."""

    def optimizer_states_on_device(self) -> AbstractContextManager[Any]:
        """Around code that reads or writes the optimizer's states, which may be offloaded."""
        return NOTHING

    def averaged(self, states: bool = False) -> AbstractContextManager[Any]:
        """Around code that reads the weights of the training, and with `states` the optimizer's: where the ranks'
        weights differ, their means replace them within it. Collective."""
        return NOTHING

    def global_gradients(self) -> AbstractContextManager[Any]:
        """Around code that reads the gradients of an update before it is made: within it they are those of the global
        batch, also where ranks use local ones. Collective."""
        return NOTHING

    def finalize(self) -> None:
        """At the end of a training: from here on all ranks have the same weights. Collective."""

    def compared(self, placed: PlacedModel, states: States) -> tuple[list[Replica], NamedTensors]:
        """The replicas that must be bit-equal on all ranks now, and further tensors that must be finite."""
        parameters = [(name, p, p) for name, p in placed.named_parameters() if placed.is_stored(p)]
        replicas = [
            Replica(name, tensor, placed.placements.placement_of(tensor, parameter).slice_index)
            for name, tensor, parameter in (*parameters, *states)
        ]
        return replicas, placed.state_without_parameters()

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise instead of one that a forward or a backward has raised; None: that one."""
        return None

    def extra_state(self) -> ExtraState:
        """The tensors that a checkpoint holds in addition to model and optimizer. Call it outside of `averaged`."""
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """From a checkpoint, after model and optimizer; `saved` is empty if another strategy wrote it."""
