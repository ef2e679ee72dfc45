"""Measures this rank's memory for parameters, gradients and optimizer states, from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import paddle

from paddle_dp.learner.learner import Learner
from paddle_dp.tensors import nbytes


def size(tensors: Iterable[paddle.Tensor | None]) -> int:
    """The bytes of the tensors; a freed tensor keeps its shape, but counts 0."""
    allocated = (t for t in tensors if t is not None and t._is_initialized())
    return sum(nbytes(t) for t in allocated)


def states(optimizer: Any) -> list[paddle.Tensor]:
    """The tensors of an optimizer's state, including float32 master weights."""
    state = dict(optimizer.state_dict())
    masters = state.pop("master_weights", {})
    state.pop("LR_Scheduler", None)
    return [*state.values(), *masters.values()]


class MemoryMeter:
    """Measures a learner: the bytes at its latest update (`now`), and the peak during backwards (`most`).

    At an update, gradients, optimizer states and parameters are all allocated; during a backward, also gathered
    parameters of other ranks, and gradients that are not reduced yet.
    """

    def __init__(self, learner: Learner):
        self.parameters = [p for _, p in learner.placed.named_parameters()]
        self.optimizer, self._step = learner.optimizer, learner.update
        self.now: dict[str, int] = {}
        self.most = {"parameters": 0, "gradients": 0}
        learner.update = self._counted_step  # type: ignore[method-assign]
        for parameter in self.parameters:
            if not parameter.stop_gradient:
                parameter._register_backward_hook(partial(self._after_gradient, parameter))

    def read(self) -> dict[str, int]:
        """The bytes at the latest update, and "most parameters" and "most gradients" over all backwards so far."""
        return {**self.now, **{f"most {name}": value for name, value in self.most.items()}}

    def _counted_step(self) -> None:
        counts = self._count()
        self.most = {name: max(self.most[name], counts[name]) for name in counts}
        self._step()  # the first one creates the states
        self.now = {**self._count(), "optimizer": size(states(self.optimizer))}

    def _count(self) -> dict[str, int]:
        gradients = [p.grad for p in self.parameters if not p.stop_gradient]
        return {"parameters": size(self.parameters), "gradients": size(gradients)}

    def _after_gradient(self, parameter: paddle.Tensor, *_: Any) -> None:
        """Runs after sharding's hooks, so it adds the bytes that they have just freed for this parameter."""
        counts, parameter_bytes = self._count(), nbytes(parameter)
        counts["parameters"] += 0 if parameter._is_initialized() else parameter_bytes
        counts["gradients"] += 0 if parameter.grad is not None else parameter_bytes
        self.most = {name: max(self.most[name], counts[name]) for name in counts}
