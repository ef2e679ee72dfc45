"""Finds state of a user's optimizer that is not in its state_dict, so that checkpoints do not save it."""

from __future__ import annotations

from typing import Any

from paddle_dp.parallel.attributes import digest, on_parameters, set_by_paddle
from paddle_dp.parallel.given_optimizer import parameters_of


class OptimizerMemory:
    """Digests an optimizer's attributes when it is created, and lists those that training has changed since."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._initial = self._attributes()

    def lost(self) -> list[str]:
        """The changed attributes, of the optimizer and on parameters, that neither its state_dict nor the model has."""
        if is_known(type(self.optimizer)):
            return []
        saved = self.optimizer.state_dict()
        return [
            name
            for name, value in self._attributes().items()
            if value != self._initial.get(name) and name not in saved and name.lstrip("_") not in saved
        ]

    def _attributes(self) -> dict[str, Any]:
        kind = type(self.optimizer)
        if is_known(kind):
            return {}
        usual = set_by_paddle(kind)
        lists = (parameters_of(self.optimizer), self.optimizer.state_dict().values())
        known = {id(tensor) for some in lists for tensor in some}
        own = {name: v for name, v in vars(self.optimizer).items() if name not in usual}
        found = {name: told for name, v in own.items() if (told := digest(v, known)) is not None}
        return found | on_parameters(parameters_of(self.optimizer))


def is_known(kind: type) -> bool:
    """Whether it is an optimizer of Paddle or of this package: their states are known to be saved."""
    return kind.__module__.partition(".")[0] in ("paddle", "paddle_dp")
