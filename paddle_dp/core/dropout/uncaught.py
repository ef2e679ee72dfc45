"""Detects random draws that exact dropout does not replace in a forward: rrelu, paddle.randn, a fused kernel, numpy.

It compares the states of the generators before and after each layer.
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

from paddle_dp.core.extra_forwards import random_state
from paddle_dp.core.programs import has_program

States = dict[str, Any]
# A call, its layer, the digest of its tensor, the axes that slice it.
Dropped = tuple[list[int], str, str, list[str]]


class DrawMonitor:
    """Finds layers that draw random numbers in a forward within `on`.

    `kinds_by_layer`: by layer ("name (Class)"), the generators that it used itself, not in its sublayers: "Paddle",
    "NumPy", "Python". `doubted`: by layer, the shape of a tensor with rows that cannot be matched with samples, and the
    number of samples. `dropped`: every dropout call, if `notes_calls`.
    """

    def __init__(self, notes_calls: bool = True) -> None:
        self.notes_calls = notes_calls
        self.kinds_by_layer: dict[str, set[str]] = {}
        self.doubted: dict[str, tuple[list[int], int]] = {}
        self.dropped: list[Dropped] = []
        self._inside: list[str] = []
        self._before: States = {}

    @contextmanager
    def on(self, layers: Sequence[tuple[str, nn.Layer]]) -> Iterator[None]:
        """Watches one forward through these named layers, and computations on its outputs (the loss). Draws of layers
        in a program of paddle.jit.to_static, which would trace the hooks, count as those of the layer around it."""
        global _watching
        outer = _watching
        self._inside = ["the loss, or code around the model"]
        self._before, _watching = rng_states(), self
        hooks = []
        traced = {id(inner) for _, layer in layers if has_program(layer) for inner in layer.sublayers()}
        for name, layer in layers:
            if id(layer) in traced:
                continue
            label = f"{name or 'the model'} ({type(layer).__name__})"
            hooks.append(layer.register_forward_pre_hook(lambda *_, label=label: self._enter(label)))
            hooks.append(layer.register_forward_post_hook(lambda *_: self._leave()))
        try:
            yield
            self._look()
        finally:
            _watching = outer
            for hook in hooks:
                hook.remove()

    def _enter(self, label: str) -> None:
        self._look()
        self._inside.append(label)

    def _leave(self) -> None:
        self._look()
        self._inside.pop()

    def _look(self) -> None:
        """Attributes draws since the last look to the running layer."""
        now = rng_states()
        changed = {name for name, state in now.items() if state != self._before[name]}
        if changed:
            self.kinds_by_layer.setdefault(self._inside[-1], set()).update(changed)
        self._before = now


_watching: DrawMonitor | None = None


def doubt(x: paddle.Tensor, samples: int) -> None:
    """Records in the active watch that the rows of `x` cannot be matched with samples: dim 0 is not a multiple of the
    samples, or larger while dim 1 has their number. A single sample is never ambiguous."""
    if _watching is None or samples < 2 or isinstance(x, Parameter) or not x.shape:
        return
    first, *trailing = x.shape
    if first % samples or (first > samples and len(trailing) > 1 and trailing[0] == samples):
        _watching.doubted.setdefault(_watching._inside[-1], (list(x.shape), samples))


def note(x: paddle.Tensor, call: tuple[int, ...], axes: Sequence[str]) -> None:
    """Records in the active watch a tensor from which this call drops; `axes`: the axes along which it is a slice."""
    if _watching is not None and _watching.notes_calls:
        bits = x.detach().astype("float32").numpy().tobytes()
        digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
        _watching.dropped.append((list(call), _watching._inside[-1], digest, list(axes)))


def cut_unsaid(ranks: Sequence[tuple[dict[str, int], list[Dropped]]]) -> dict[str, str]:
    """By layer, the axis along which ranks hold different activations but drew one mask.

    `ranks`: each rank's coordinates by axis, and its watch's `dropped`.
    """
    undeclared: dict[str, str] = {}
    for axis in ("tensor", "sequence"):
        if len({coords.get(axis) for coords, _ in ranks}) == 1:
            continue  # nothing is sliced along it
        label_by_call: dict[tuple[object, ...], str] = {}
        for coords, dropped in ranks:
            other_coords = tuple(sorted((name, coord) for name, coord in coords.items() if name != axis))
            for call, label, digest, axes in dropped:
                if axis not in axes and label_by_call.setdefault((other_coords, *call), digest) != digest:
                    undeclared[label] = axis
    return undeclared


@contextmanager
def another_stream(switched: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters `switched`, which sets and resets the state of Paddle's generators, without counting that as a draw."""
    watch = _watching
    if watch is None:
        with switched:
            yield
        return
    watch._look()
    with switched:
        watch._before = rng_states()
        yield
        watch._look()
    watch._before = rng_states()


def rng_states() -> States:
    """The state of every generator that this process uses, comparable."""
    __, keys, *rest = np.random.get_state()
    numpy_state = np.asarray(keys).tobytes(), *rest
    return {"Paddle": random_state(), "NumPy": numpy_state, "Python": random.getstate()}
