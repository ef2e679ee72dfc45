"""Notices what draws random numbers in a forward and is not dropout of ours: rrelu, paddle.rand, a fused kernel, numpy.

By comparing the states of the generators before and after each layer, in one forward; so it costs nothing later.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase as Parameter

States = dict[str, Any]
Dropped = tuple[
    list[int], str, str, list[str]
]  # a call, its layer, the digest of its tensor, the axes that cut it


class Watch:
    """Names the layers of a model that draw random numbers while it is `on`.

    `found`: by layer («name (Class)») the generators that it moved: "Paddle", "NumPy", "Python". A layer is named for
    what it draws itself, not for what its sublayers draw. `doubted`: by layer the shape of a tensor whose samples
    nobody can tell, and how many samples there are. `dropped`: what each call of
    dropout was on.
    """

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}
        self.doubted: dict[str, tuple[list[int], int]] = {}
        self.dropped: list[Dropped] = []
        self._inside: list[str] = []
        self._before: States = {}

    @contextmanager
    def on(self, layers: Sequence[tuple[str, nn.Layer]]) -> Iterator[None]:
        """Watches one forward through these named layers, and what is computed of its outputs in it (the loss)."""
        global _watching
        self._inside, self._before, _watching = ["the loss, or what is around the model"], _states(), self
        hooks = []
        for name, layer in layers:
            label = f"{name or 'the model'} ({type(layer).__name__})"
            hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: self._enter(label)))
            hooks.append(layer.register_forward_post_hook(lambda *_: self._leave()))
        try:
            yield
            self._look()
        finally:
            _watching = None
            for hook in hooks:
                hook.remove()

    def _enter(self, label: str) -> None:
        self._look()
        self._inside.append(label)

    def _leave(self) -> None:
        self._look()
        self._inside.pop()

    def _look(self) -> None:
        """Blames the layer that is running for what has moved since the last look."""
        now = _states()
        moved = {name for name, state in now.items() if state != self._before[name]}
        if moved:
            self.found.setdefault(self._inside[-1], set()).update(moved)
        self._before = now


_watching: Watch | None = None


def doubt(x: paddle.Tensor, samples: int) -> None:
    """Says, while somebody watches, if it cannot be told which rows of `x` are which sample's: dim 0 is no multiple of
    the samples, or dim 1 is as many as they are and dim 0 is more of them. One sample is told from nothing."""
    if _watching is None or samples < 2 or isinstance(x, Parameter) or not x.shape:
        return
    first, *others = x.shape
    if first % samples or (first > samples and len(others) > 1 and others[0] == samples):
        _watching.doubted.setdefault(_watching._inside[-1], (list(x.shape), samples))


def note(x: paddle.Tensor, call: tuple[int, ...], axes: Sequence[str]) -> None:
    """Writes down, while somebody watches, what this call drops from; `axes`: along which it is known to be a slice."""
    if _watching is not None:
        bits = x.detach().astype("float32").numpy().tobytes()
        digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
        _watching.dropped.append((list(call), _watching._inside[-1], digest, list(axes)))


def cut_unsaid(ranks: Sequence[tuple[dict[str, int], list[Dropped]]]) -> dict[str, str]:
    """By layer the axis along which ranks dropped from different activations, as if they were one and the same.

    `ranks`: of each its coordinates by axis, and what its watch `dropped`.
    """
    found: dict[str, str] = {}
    for axis in ("tensor", "sequence"):
        seen: dict[tuple[object, ...], str] = {}
        for coords, dropped in ranks:
            others = tuple(sorted((name, place) for name, place in coords.items() if name != axis))
            for call, label, digest, axes in dropped:
                if axis not in axes and seen.setdefault((others, *call), digest) != digest:
                    found[label] = axis
    return found


@contextmanager
def another_stream(switched: AbstractContextManager[Any]) -> Iterator[None]:
    """Within `switched`, which puts another state into Paddle's generators and takes it away again: that is no draw."""
    watch = _watching
    if watch is None:
        with switched:
            yield
        return
    watch._look()
    with switched:
        watch._before = _states()
        yield
        watch._look()
    watch._before = _states()


def _states() -> States:
    """Of every generator something that a draw changes."""
    paddles = [state.__getstate__()[1:] for state in paddle.get_rng_state()]
    __, keys, *rest = np.random.get_state()
    return {"Paddle": paddles, "NumPy": (np.asarray(keys).tobytes(), *rest), "Python": random.getstate()}
