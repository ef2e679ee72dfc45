"""Where a forward is: in which update, with which samples of the global batch, in which block, in which slice of what.

A learner opens a `Scope` around each forward; outside of one, Paddle draws its own masks. What is in a scope can be
written down and put back, so that a forward that backward computes again (recompute) draws what the first one drew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import nn

from paddle_dp.parallel.dropout import masks
from paddle_dp.parallel.dropout.masks import Keys, Ranges

Kind = Literal["tokens", "colwise", "heads"]
Axis = Literal["tensor", "sequence"]


@dataclass(frozen=True)
class Slice:
    """What a rank holds of an activation along one axis: number `rank` of `ranks` equal runs.

    Of its `tokens` ([n, t / ranks, …]); of its columns (`colwise`), the last dim; or of the `heads` of an attention
    ([n, heads / ranks, t, t], [n, t, heads / ranks, …], [n, t, heads / ranks · …] or [n · heads / ranks, t, t]), where
    `lengths` says how many tokens t may be.
    """

    kind: Kind
    rank: int
    ranks: int
    lengths: tuple[int, ...] = ()

    def dim(self, shape: tuple[int, ...]) -> int:
        """Which dim is cut, of a sample's shape: rows of one sample first, then the dims behind."""
        if self.kind == "colwise":
            return len(shape) - 1
        rows = shape[0] > 1  # samples · something lie in one dim: flattened tokens, or heads
        if self.kind == "tokens":
            return 0 if rows or len(shape) == 1 else 1
        weights = shape[-1] in self.lengths and shape[-2:] == shape[-1:] * 2  # of each token for each
        if rows or (len(shape) == 3 and weights):  # the second: one head here of [n · heads, t, t]
            return 0
        if len(shape) == 4 and (weights or shape[1] not in self.lengths):
            return 1
        return min(2, len(shape) - 1)


# Where two axes cut one dim, the first named holds the larger runs: heads are cut over the tensor axis before they are
# traded over the sequence axis, and shards of tokens the other way round.
_ORDER: Mapping[Kind, tuple[Axis, ...]] = {
    "tokens": ("sequence", "tensor"),
    "colwise": ("tensor", "sequence"),
    "heads": ("tensor", "sequence"),
}


@dataclass(frozen=True)
class Kept:
    """A scope as it was at one moment."""

    scope: Scope
    element: int
    calls: dict[int, int]
    slices: dict[Axis, Slice]


class Scope:
    """The samples of one micro-batch in one update, and which call of which block comes next.

    The micro-batch holds the samples `first` to `first + samples` of global batch `index` of `epoch`, or those at
    `places`: known by
    arithmetic on every rank, so equal on any number of them, and after a resume. Calls are counted per element: the
    number of the block that is running (from 1), 0 outside of all.
    """

    def __init__(
        self, seed: int, epoch: int, index: int, first: int, samples: int, places: Sequence[int] | None = None
    ):
        self.samples = samples
        self._update, self._first, self._places = masks.word(seed, epoch, index), first, places
        self.element = 0
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
        """What tells the call that comes now from all others of this update: its micro-batch, its block, its number."""
        return self._first, self.element, self.calls.get(self.element, 0)

    def next_keys(self, shared: bool = False) -> Keys:
        """The keys of this micro-batch's samples in the call that comes now; the one key of all samples if `shared`."""
        number = self.calls.get(self.element, 0)
        self.calls[self.element] = number + 1
        return masks.keys(self._everybody if shared else self._words, masks.word(self.element, number))

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        following = range(self._first, self._first + self.samples)
        return masks.words(self._update, following if self._places is None else self._places)

    @cached_property
    def _everybody(self) -> NDArray[np.uint64]:
        return masks.words(self._update, [masks.EVERYBODY])

    def held(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Ranges]:
        """The whole of which a sample's `shape` (its rows first) is this rank's slice, and where that lies in it."""
        whole, ranges = list(shape), list(masks.everything(shape))
        for kind, order in _ORDER.items():
            for axis in reversed(order):  # the smaller runs first
                cut = self.slices.get(axis)
                if cut is None or cut.kind != kind:
                    continue
                dim = cut.dim(shape)
                low, high = ranges[dim]
                offset = cut.rank * whole[dim]
                ranges[dim] = (low + offset, high + offset)
                whole[dim] *= cut.ranks
        return tuple(whole), tuple(ranges)


_current: Scope | None = None


def current() -> Scope | None:
    """The scope of the forward that is running, if it is a learner's and draws exactly."""
    return _current


def scope_of(x: Any) -> Scope | None:
    """The scope that a call on `x` is in. A program that is being traced (to_static) is in none."""
    return _current if isinstance(x, paddle.Tensor) else None


def keep() -> Kept | None:
    """Where the forward is now; None outside of all scopes."""
    scope = _current
    if scope is None:
        return None
    return Kept(scope, scope.element, dict(scope.calls), dict(scope.slices))


def put_back(kept: Kept | None) -> None:
    """Goes on where `keep` was called, whatever came after."""
    global _current
    _current = None if kept is None else kept.scope
    if kept is not None:
        kept.scope.element = kept.element
        kept.scope.calls, kept.scope.slices = dict(kept.calls), dict(kept.slices)


def within_slice(
    function: Callable[..., Any], axis: Axis, kind: Kind, rank: int, ranks: int
) -> Callable[..., Any]:
    """`function`, which works on one rank's slice of its activations: masks there are that slice of the whole's."""

    @functools.wraps(function)
    def forward(*inputs: Any, **named: Any) -> Any:
        scope = _current
        if scope is None:
            return function(*inputs, **named)
        before = scope.slices
        lengths = _lengths(inputs[0], before.get(axis)) if kind == "heads" and inputs else ()
        scope.slices = {**before, axis: Slice(kind, rank, ranks, lengths)}
        try:
            return function(*inputs, **named)
        finally:
            scope.slices = before

    return forward


def _lengths(given: Any, around: Slice | None) -> tuple[int, ...]:
    """How many tokens [n, t, …] may have: as sequence shards, they may be gathered inside the function or before it."""
    if len(given.shape) < 2:
        return ()
    here = given.shape[1]
    return (here, here * around.ranks) if around is not None and around.kind == "tokens" else (here,)


def number_elements(blocks: Iterable[tuple[int, nn.Layer]]) -> None:
    """Lets each of these blocks count its calls for itself: a stage of a pipeline then needs no other's count.

    `blocks`: with their number in the whole model. Several layers of one number are one block; a layer of several
    numbers is used in several blocks, in the order of a forward.
    """
    numbers: dict[nn.Layer, list[int]] = {}
    for number, block in blocks:
        numbers.setdefault(block, []).append(number)
    for block, its in numbers.items():
        entered: list[int] = []

        def enter(layer: nn.Layer, inputs: Any, its: list[int] = its, entered: list[int] = entered) -> None:
            if _current is not None:
                entered.append(_current.element)
                _current.element = _next_of(its, _current.calls) + 1

        def leave(layer: nn.Layer, inputs: Any, outputs: Any, entered: list[int] = entered) -> None:
            if _current is not None and entered:
                _current.element = entered.pop()

        block.register_forward_pre_hook(enter)
        block.register_forward_post_hook(leave)


def _next_of(numbers: list[int], calls: dict[int, int]) -> int:
    """The block that a layer is used in now. Uses are counted among the calls, below 0: recompute puts both back."""
    if len(numbers) == 1:
        return numbers[0]
    key = -1 - numbers[0]
    use = calls[key] = calls.get(key, -1) + 1
    return numbers[use % len(numbers)]
