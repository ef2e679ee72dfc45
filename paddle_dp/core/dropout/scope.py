"""The state that determines a dropout mask: the update, the samples, the block, the call, the slice of the activation.

A learner opens a `Scope` around each forward; outside one, Paddle draws its usual masks. Recompute saves and restores
the state, so that a repeated forward draws the same masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from paddle_dp.core.dropout import masks
from paddle_dp.core.dropout.masks import Keys, Ranges

Kind = Literal["tokens", "colwise", "channels", "heads"]
Axis = Literal["tensor", "sequence"]

EVALUATION = -1  # the epoch of evaluations: their masks belong to no update


@dataclass(frozen=True)
class Slice:
    """A rank's share of an activation along one axis: number `rank` of `ranks` equal slices.

    `kind` names the sliced dim: `tokens` ([n, t / ranks, …]); the last dim (`colwise`); `channels` ([n, channels /
    ranks, height, width]); or the `heads` of an attention ([n, heads / ranks, t, t], [n, t, heads / ranks, …], [n, t,
    heads / ranks · …] or [n · heads / ranks, t, t]), for which `lengths` are the possible values of t.
    """

    kind: Kind
    rank: int
    ranks: int
    lengths: tuple[int, ...] = ()

    def dim(self, shape: tuple[int, ...]) -> int:
        """The sliced dim, in the shape of one sample: its rows in dim 0, then the other dims."""
        if self.kind == "colwise":
            return len(shape) - 1
        if self.kind == "channels":
            return 1
        rows = shape[0] > 1  # dim 0 is samples · tokens or samples · heads
        if self.kind == "tokens":
            return 0 if rows or len(shape) == 1 else 1
        weights = shape[-1] in self.lengths and shape[-2:] == shape[-1:] * 2  # attention weights [t, t]
        if rows or (len(shape) == 3 and weights):  # the second: [n · heads, t, t] with one head on this rank
            return 0
        if len(shape) == 4 and (weights or shape[1] not in self.lengths):
            return 1
        return min(2, len(shape) - 1)


# If two axes slice one dim, the first makes the larger slices: heads are cut over the tensor axis before the sequence
# axis exchanges them; tokens the other way round.
_ORDER: Mapping[Kind, tuple[Axis, ...]] = {
    "tokens": ("sequence", "tensor"),
    "colwise": ("tensor", "sequence"),
    "channels": ("tensor", "sequence"),
    "heads": ("tensor", "sequence"),
}


@dataclass(frozen=True)
class Saved:
    """The state of a scope at one moment."""

    scope: Scope
    block: int
    calls: dict[int, int]
    slices: dict[Axis, Slice]


class Scope:
    """The samples of one micro-batch in one update, and the counters of calls by block.

    The micro-batch holds the samples `first` to `first + samples` of global batch `index` of `epoch`, or the samples at
    `positions`, on any number of ranks and after a resume. Calls are counted per `block`: the number of the running
    one from 1 on, or 0 outside all blocks.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        index: int,
        first: int,
        samples: int,
        positions: Sequence[int] | None = None,
    ):
        self.samples, self.in_evaluation = samples, epoch == EVALUATION
        self._numbers, self._first, self._positions = (seed, epoch, index), first, positions
        self.block = 0
        self.calls: dict[int, int] = {}
        self.slices: dict[Axis, Slice] = {}

    def __enter__(self) -> Scope:
        global _current
        self._before, _current = _current, self
        return self

    def __exit__(self, *exception: object) -> None:
        global _current
        _current = self._before

    @property
    def call(self) -> tuple[int, ...]:
        """Identifies the next call in this update: micro-batch, block, number."""
        return self._first, self.block, self.calls.get(self.block, 0)

    def next_keys(self, shared: bool = False) -> Keys:
        """The keys of this micro-batch's samples in the next call; one key for all samples if `shared`."""
        number = self.calls.get(self.block, 0)
        self.calls[self.block] = number + 1
        return masks.keys(self._shared_hash if shared else self._words, masks.hash64(self.block, number))

    @cached_property
    def _update(self) -> int:
        return masks.hash64(*self._numbers)

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        following = range(self._first, self._first + self.samples)
        return masks.sample_hashes(self._update, following if self._positions is None else self._positions)

    @cached_property
    def _shared_hash(self) -> NDArray[np.uint64]:
        return masks.sample_hashes(self._update, [masks.SHARED])

    def locate_slice(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Ranges]:
        """Locates this rank's slice, `shape` per sample: returns the full shape of the activation and the slice's
        ranges."""
        full_shape, ranges = list(shape), list(masks.everything(shape))
        for kind, order in _ORDER.items():
            for axis in reversed(order):  # the smaller slices first
                cut = self.slices.get(axis)
                if cut is None or cut.kind != kind:
                    continue
                dim = cut.dim(shape)
                low, high = ranges[dim]
                offset = cut.rank * full_shape[dim]
                ranges[dim] = (low + offset, high + offset)
                full_shape[dim] *= cut.ranks
        return tuple(full_shape), tuple(ranges)

    def subset(self, start: int, stop: int) -> Scope:
        """The same state for samples `start` to `stop` only."""
        following = range(self._first, self._first + self.samples)
        positions = following if self._positions is None else self._positions
        subset_scope = copy(self)
        subset_scope.samples, subset_scope._positions = stop - start, positions[start:stop]
        subset_scope.calls, subset_scope.slices = dict(self.calls), dict(self.slices)
        vars(subset_scope).pop("_words", None)
        return subset_scope


_current: Scope | None = None


@contextmanager
def within_samples(start: int, stop: int) -> Iterator[None]:
    """Wraps a forward of samples `start` to `stop` of the current scope, if any. All such parts share the same call
    numbers; the scope counts them after the last part."""
    outer = _current
    if outer is None:
        yield
        return
    with outer.subset(start, stop) as subset_scope:
        yield
    if stop == outer.samples:
        outer.calls = subset_scope.calls


def current() -> Scope | None:
    """The scope of the running forward, if a learner with exact dropout runs it."""
    return _current


def scope_of(x: Any) -> Scope | None:
    """The scope of a call on `x`; None while a program is traced (to_static)."""
    return _current if isinstance(x, paddle.Tensor) else None


def save() -> Saved | None:
    """The current state; None outside all scopes."""
    scope = _current
    if scope is None:
        return None
    return Saved(scope, scope.block, dict(scope.calls), dict(scope.slices))


def restore(saved: Saved | None) -> None:
    """Restores the state that `save` returned."""
    global _current
    _current = None if saved is None else saved.scope
    if saved is not None:
        saved.scope.block = saved.block
        saved.scope.calls, saved.scope.slices = dict(saved.calls), dict(saved.slices)


def within_slice(
    function: Callable[..., Any], axis: Axis, kind: Kind, rank: int, ranks: int
) -> Callable[..., Any]:
    """Wraps a `function` of one rank's slices: it draws the slice of the full activation's masks."""

    @functools.wraps(function)
    def forward(*inputs: Any, **named: Any) -> Any:
        scope = _current
        if scope is None:
            return function(*inputs, **named)
        before = scope.slices
        lengths = _lengths((*inputs, *named.values()), before.get(axis)) if kind == "heads" else ()
        scope.slices = {**before, axis: Slice(kind, rank, ranks, lengths)}
        try:
            return function(*inputs, **named)
        finally:
            scope.slices = before

    return forward


def _lengths(inputs: Iterable[Any], outer: Slice | None) -> tuple[int, ...]:
    """The possible values of t for the first tensor, [n, t, …]: a sequence shard may be gathered within the function,
    or before it."""
    here = next((tuple(x.shape[1:2]) for x in inputs if hasattr(x, "shape")), ())
    return (*here, *(t * outer.ranks for t in here)) if outer is not None and outer.kind == "tokens" else here


def number_blocks(blocks: Iterable[tuple[int, nn.Layer]]) -> None:
    """Counts the calls of each block separately, so that a pipeline stage does not depend on the other stages' calls.

    `blocks`: (number in the whole model, layer). Layers with the same number form one block; a layer with several
    numbers is used in several blocks, in forward order.
    """
    numbers: dict[nn.Layer, list[int]] = {}
    for number, block in blocks:
        if not all(map(_never_draws, block.sublayers(include_self=True))):
            numbers.setdefault(block, []).append(number)
    for block, block_numbers in numbers.items():
        outer: list[int] = []

        def enter(
            layer: nn.Layer,
            inputs: Any,
            block_numbers: list[int] = block_numbers,
            outer: list[int] = outer,
        ) -> None:
            if _current is not None:
                outer.append(_current.block)
                _current.block = _next_of(block_numbers, _current.calls) + 1

        def leave(layer: nn.Layer, inputs: Any, outputs: Any, outer: list[int] = outer) -> None:
            if _current is not None and outer:
                _current.block = outer.pop()

        block.register_forward_pre_hook(enter)
        block.register_forward_post_hook(leave)


_WITHOUT_DRAWS = frozenset({
    nn.Linear, nn.Conv1D, nn.Conv2D, nn.Conv3D, nn.Embedding, nn.Flatten, nn.Identity, nn.Sequential, nn.LayerNorm,
    nn.ReLU, nn.GELU, nn.Silu, nn.Tanh, nn.Sigmoid, nn.MaxPool2D, nn.AvgPool2D, nn.AdaptiveAvgPool2D,
})  # fmt: skip


def _never_draws(layer: nn.Layer) -> bool:
    """True for Paddle's layers without random numbers, unless they have hooks: two hooks that number its calls would
    take longer than a small layer's forward."""
    return type(layer) in _WITHOUT_DRAWS and not (layer._forward_pre_hooks or layer._forward_post_hooks)


def _next_of(numbers: list[int], calls: dict[int, int]) -> int:
    """The number of the block in which a layer runs now. `calls` counts uses under negative keys, as recompute restores
    `calls`."""
    if len(numbers) == 1:
        return numbers[0]
    key = -1 - numbers[0]
    use = calls[key] = calls.get(key, -1) + 1
    return numbers[use % len(numbers)]
