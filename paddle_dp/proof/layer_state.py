"""The state of layers and loss outside their weights: attributes, buffers, modes, hooks, variables of their modules."""

from __future__ import annotations

import sys
from collections import deque
from types import FunctionType
from typing import Any

import numpy as np
import paddle

from paddle_dp.core.consistency import digests
from paddle_dp.identity.walk import Walker, hooks_of, is_library
from paddle_dp.learner import Learner
from paddle_dp.proof.record import running_statistics
from paddle_dp.proof.trace_files import MODEL_LAYER

_DATA = (bool, int, float, list, dict, set, deque, np.ndarray, paddle.Tensor)


class LayerStateChanges:
    """The changes in a learner's layers, and in its loss, since this object was made.

    `by_step`: the JSON values that differ from the beginning, by step and by "buffer body.3.queue", "`mean` of body.3".
    """

    def __init__(self, learner: Learner):
        self._layers = learner.placed.named_layers()
        self._loss = learner.loss.owner
        self._statistics = running_statistics(learner)
        self._learner = learner
        self._initial, self._initial_digests = self._state(), self._digests()
        self.by_step: dict[int, dict[str, Any]] = {}

    def record(self, step: int) -> None:
        """Records the changes up to the end of this step."""
        state = self._state()
        names = {*state, *self._initial}
        changed = {name: state.get(name) for name in names if state.get(name) != self._initial.get(name)}
        buffers = dict(self._learner.placed.named_buffers())
        for name, digest in self._digests().items():
            if digest != self._initial_digests.get(name):
                changed[f"buffer {name}"] = _sketch(buffers[name])
        if changed:
            self.by_step[step] = changed

    def _state(self) -> dict[str, Any]:
        """The state by name: attributes, hooks and modes of the layers and the loss, variables of their modules."""
        owners = [(name or MODEL_LAYER, layer) for name, layer in self._layers]
        if self._loss is not None and not any(self._loss is layer for _, layer in owners):
            owners.append(("the loss", self._loss))
        state: dict[str, Any] = {}
        for name, owner in owners:
            if type(owner).__module__.startswith(("paddle_dp.", "paddle.distributed.")):
                continue  # exists on ranks only
            facts = Walker(state=True).settings_of(owner)
            if isinstance(owner, paddle.nn.Layer):
                facts |= hooks_of(owner) | {"training": owner.training}
            state |= {f"`{attribute}` of {name}": fact for attribute, fact in facts.items()}
        definitions = (owner if isinstance(owner, FunctionType) else type(owner) for _, owner in owners)
        modules = {each.__module__ for each in definitions if not is_library(each.__module__)}
        for module in sorted(modules & sys.modules.keys()):
            variables = {n: v for n, v in vars(sys.modules[module]).items() if isinstance(v, _DATA)}
            state |= {f"`{n}` of module {module}": fact for n, fact in Walker().walk(variables).items()}
        return state

    def _digests(self) -> dict[str, Any]:
        """The digests of the buffers by name, without running statistics, which the recorder records."""
        named = [(n, b) for n, b in self._learner.placed.named_buffers() if n not in self._statistics]
        return dict(zip((n for n, _ in named), digests(b for _, b in named), strict=True))


def _sketch(buffer: paddle.Tensor) -> list[float]:
    """Two numbers that change with every element, and little with its last place: the 2-norm, and a weighted sum."""
    flat = buffer.detach().astype("float64").numpy().reshape(-1)
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]
