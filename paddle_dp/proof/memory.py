"""Records the state of layers and loss outside their weights: attributes, globals, buffers, modes, settings and hooks.

Ranks exchange none of it except buffers. Changes are recorded after each step, to name a value that differs between a
rank and one process (diagnose.memory). Recording reads this rank's values only, and changes nothing.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from typing import Any

import numpy as np
import paddle

from paddle_dp.identity.settings import described, hooks_of, settings_of
from paddle_dp.parallel import Learner
from paddle_dp.parallel.consistency import digests
from paddle_dp.proof.record import running_statistics


class Memory:
    """The changes in a learner's layers, and in its loss, since this object was made.

    `steps`: by step, the JSON values that differ from the beginning, by «buffer body.3.queue», «`mean` of body.3».
    """

    def __init__(self, learner: Learner):
        self._layers = learner.placed.named_layers()
        self._loss = learner.loss.owner
        self._statistics = running_statistics(learner)
        self._learner = learner
        self._settings, self._bits = self._read(), self._digests()
        self.steps: dict[int, dict[str, Any]] = {}

    def look(self, step: int) -> None:
        """Records the changes up to the end of this step."""
        now = self._read()
        changed = {name: now.get(name) for name in {*now, *self._settings} if self._other(name, now)}
        buffers = dict(self._learner.placed.named_buffers())
        for name, bits in self._digests().items():
            if bits != self._bits.get(name):
                changed[f"buffer {name}"] = _sketch(buffers[name])
        if changed:
            self.steps[step] = changed

    def _other(self, name: str, now: dict[str, Any]) -> bool:
        before, after = self._settings.get(name), now.get(name)
        return before != after and repr(before) != repr(after)  # a NaN is no change

    def _read(self) -> dict[str, Any]:
        owners = [(name or "the model", layer) for name, layer in self._layers]
        if self._loss is not None and not any(self._loss is layer for _, layer in owners):
            owners.append(("the loss", self._loss))
        state: dict[str, Any] = {}
        for owner, thing in owners:
            if type(thing).__module__.startswith(("paddle_dp.", "paddle.distributed.")):
                continue  # exists on ranks only
            facts = settings_of(thing) | _moving(thing)
            if isinstance(thing, paddle.nn.Layer):
                facts |= hooks_of(thing) | {"training": thing.training}
            state |= {f"`{name}` of {owner}": fact for name, fact in facts.items()}
        return state

    def _digests(self) -> dict[str, Any]:
        named = [(n, b) for n, b in self._learner.placed.named_buffers() if n not in self._statistics]
        return dict(zip((n for n, _ in named), digests(b for _, b in named), strict=True))


def _moving(thing: Any) -> dict[str, Any]:
    """The attributes that change with use: queues, and generators by their state."""
    own = getattr(thing, "__dict__", {})
    queues = described({name: list(value) for name, value in own.items() if isinstance(value, deque)})
    states = {name: _state_of(value) for name, value in own.items()}
    return queues | {name: state for name, state in states.items() if state is not None}


def _state_of(value: Any) -> str | None:
    """A checksum of a generator's state; None for another value."""
    state: Any = None
    if isinstance(value, random.Random):
        state = value.getstate()
    elif isinstance(value, np.random.Generator):
        state = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        state = value.get_state()
    return None if state is None else f"state {zlib.crc32(repr(state).encode()):08x}"


def _sketch(buffer: paddle.Tensor) -> list[float]:
    """Two numbers that change with every element, and little with its last place: the 2-norm, and a weighted sum."""
    flat = buffer.detach().astype("float64").numpy().reshape(-1)
    return [float(np.linalg.norm(flat)), float(flat @ np.cos(np.arange(flat.size)))]
