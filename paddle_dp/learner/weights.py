"""How ranks get the weights of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import paddle

from paddle_dp.core.consistency import Replica
from paddle_dp.core.extra_state import ExtraState, SavedExtraState
from paddle_dp.core.placed_model import NamedTensors, PlacedModel
from paddle_dp.learner.update import UpdateMode

NOTHING = nullcontext()
States = Iterable[tuple[str, paddle.Tensor, paddle.Tensor]]
"""Optimizer states: name, tensor, and the parameter."""


class WeightSync:
    """Every rank makes the same step, so nothing is sent. Strategies that send weights have subclasses.

    `mode`: how updates are computed. `collective_forward`: a forward gathers weights from other ranks (ZeRO-3).
    `diverged`: the ranks' weights differ now. `overlaps`: new weights may still arrive after `publish`, because the
    next forward waits for them layer by layer; while it is set, call `wait` before reading a parameter elsewhere.
    `description`: the part of a sentence that replaces the exchange's; "" for the exchange's.
    """

    collective_forward: bool = False
    diverged: bool = False
    description: str = ""

    def __init__(self, mode: UpdateMode):
        self.mode, self.overlaps = mode, False
        self.after_equal: Callable[[], None] = lambda: None  # the checks, once weights are equal again

    def begin_update(self, number: int) -> UpdateMode:
        """Returns the mode of update `number` (from 1), before its forward. Collective."""
        return self.mode

    def publish(self) -> None:
        """Sends the new weights after the optimizer's step; they have arrived after `wait`. Collective."""

    def wait(self) -> None:
        """Waits, on the device, until this rank's parameters have their newest values."""

    def share(self) -> None:
        """Sends values that owners have written into their parameters to the ranks that hold copies. Collective."""

    def forward_only(self) -> AbstractContextManager[Any]:
        """A context for a forward without backward."""
        return NOTHING

    def end_pass(self, backward: bool) -> None:
        """Called after each forward and backward of a pipeline stage."""

    def optimizer_states_on_device(self) -> AbstractContextManager[Any]:
        """A context for reading or writing the optimizer's states, which may be offloaded."""
        return NOTHING

    def averaged(self, states: bool = False) -> AbstractContextManager[Any]:
        """A context for reading the weights of the training, and with `states` the optimizer's states: if the ranks'
        differ, means replace them within it. Collective."""
        return NOTHING

    def global_gradients(self) -> AbstractContextManager[Any]:
        """A context for reading the gradients of an update before its step: within it they are the global batch's, even
        if ranks use local ones. Collective."""
        return NOTHING

    def finalize(self) -> None:
        """Ends a training: from here on all ranks have the same weights. Collective."""

    def compared(self, placed: PlacedModel, states: States) -> tuple[list[Replica], NamedTensors]:
        """The replicas that must be bit-equal on all ranks now, and other tensors that must be finite."""
        parameters = [(name, p, p) for name, p in placed.named_parameters() if placed.is_stored(p)]
        replicas = [
            Replica(name, tensor, placed.placements.placement_of(tensor, parameter).slice_index)
            for name, tensor, parameter in (*parameters, *states)
        ]
        return replicas, placed.state_without_parameters()

    def explain(self, error: RuntimeError) -> Exception | None:
        """The error to raise instead of an `error` in a forward or a backward; None: raise `error`."""
        return None

    def extra_state(self) -> ExtraState:
        """The tensors that a checkpoint holds in addition to model and optimizer. Call it outside of `averaged`."""
        return ExtraState()

    def load_extra_state(self, saved: SavedExtraState) -> None:
        """Loads them after model and optimizer; `saved` is empty if another strategy wrote the checkpoint."""
