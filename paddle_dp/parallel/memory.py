"""What this rank holds while it learns, counted in the tensors themselves: parameters, gradients, optimizer states."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import paddle

from paddle_dp.parallel.learner import Learner


def size(tensors: Iterable[paddle.Tensor | None]) -> int:
    """The bytes of those tensors that have values: an emptied one has its shape, and no memory."""
    there = (t for t in tensors if t is not None and t._is_initialized())
    return sum(t.size * t.element_size() for t in there)


def states(optimizer: Any) -> list[paddle.Tensor]:
    """The live tensors of an optimizer's state, among them the float32 copies of weights in half precision."""
    found = dict(optimizer.state_dict())
    masters = found.pop("master_weights", {})
    found.pop("LR_Scheduler", None)
    return [*found.values(), *masters.values()]


class MemoryMeter:
    """Watches a learner: the bytes at its latest update (`now`), and the most at any moment of a backward (`most`).

    An update is the moment when gradients, states and parameters are all there; within a backward, layers have borrowed
    parameters, and gradients that have not met yet.
    """

    def __init__(self, learner: Learner):
        self.parameters = [p for _, p in learner.named_parameters()]
        self.optimizer, self._step = learner.optimizer, learner._step
        self.now: dict[str, int] = {}
        self.most = {"parameters": 0, "gradients": 0}
        learner._step = self._counted_step  # type: ignore[method-assign]
        for parameter in self.parameters:
            if not parameter.stop_gradient:
                parameter._register_backward_hook(partial(self._met, parameter))

    def read(self) -> dict[str, int]:
        """The bytes at the latest update; "most parameters" and "most gradients": of all backwards so far."""
        return {**self.now, **{f"most {name}": value for name, value in self.most.items()}}

    def _counted_step(self) -> None:
        self._step()  # the first one makes the states
        self.now = {**self._count(), "optimizer": size(states(self.optimizer))}

    def _count(self) -> dict[str, int]:
        gradients = [p.grad for p in self.parameters if not p.stop_gradient]
        return {"parameters": size(self.parameters), "gradients": size(gradients)}

    def _met(self, parameter: paddle.Tensor, *_: Any) -> None:
        """Runs behind the hooks of sharding, so what those have just freed is counted in."""
        found, own = self._count(), parameter.size * parameter.element_size()
        found["parameters"] += 0 if parameter._is_initialized() else own
        found["gradients"] += 0 if parameter.grad is not None else own
        self.most = {name: max(self.most[name], found[name]) for name in found}
