"""Documents packed into windows of equal length: tokens, and positions that restart at each document.

A document of n tokens is n - 1 inputs, each with the next token as its target: its last token is no input, so no window
predicts one document from another. Which documents a window has is a function of (seed, epoch), equal on any number of
ranks and workers; the sampler's order of the windows comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.datasets._arrays import Array, raw_draws

IGNORED = -100  # the target of a token that does not count: loss.ignore_index
PADDING = -1  # stands for a document, where a window has no more
SIZES = 64  # steps of a window's length, to which `BestFit` rounds documents up
_DRAWS = 0x7061636B  # documents and the sampler's windows draw other numbers

Layout = tuple[Array, Array]
"""The documents of an epoch in the order of their windows, or PADDING, and how many inputs each has."""


@dataclass(frozen=True)
class Documents:
    """Documents [n] in the tokens of all: where each one begins, and how many of its tokens are inputs. `learned`:
    whether a token counts as a target; None: each does."""

    tokens: Array
    begins: Array
    inputs: Array
    learned: Array | None = None

    @classmethod
    def until(cls, ends: Array, tokens: Array, learned: Array | None = None) -> Documents:
        """Whole documents, one after another up to `ends` [n]."""
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        return cls(tokens, begins, np.maximum(ends - begins - 1, 0), learned)


class Consecutive:
    """Documents one after another, cut into full windows: one that does not fit is continued in the next, with
    positions from 0 and without the context before the cut. An incomplete window at the end is left out."""

    def __init__(self, inputs: Array, length: int):
        self.inputs, self.windows = inputs, int(inputs.sum()) // length

    def __call__(self, draws: Array) -> Layout:
        order = np.argsort(draws, kind="stable")
        return order, self.inputs[order]


class BestFit:
    """Whole documents, none longer than `length`, each in the window with the least room that it fits into, the
    longest first (best-fit decreasing, Johnson 1974; for language models Ding et al., arXiv:2404.10830).

    Sizes are rounded up to a 64th of a window. So the number of windows and the sizes in each are equal in all epochs;
    which document of a size is where, is drawn.
    """

    def __init__(self, inputs: Array, length: int):
        self.inputs, self.length, unit = inputs, length, max(1, length // SIZES)
        self.sizes = -(-inputs // unit)
        windows: list[list[int]] = [[] for _ in range(length // unit + 1)]  # by the room that they have left
        chosen, self.windows = [], 0
        for size in np.sort(self.sizes)[::-1].tolist():
            room = next((room for room in range(size, len(windows)) if windows[room]), len(windows) - 1)
            if not windows[room]:
                windows[room].append(self.windows)
                self.windows += 1
            window = windows[room].pop()
            windows[max(0, room - size)].append(window)
            chosen.append(window)
        self._by_window = np.argsort(chosen, kind="stable")
        self._lasts = np.cumsum(np.bincount(chosen, minlength=self.windows)) if chosen else np.zeros(0, int)

    def __call__(self, draws: Array) -> Layout:
        documents = np.lexsort((draws, -self.sizes))[self._by_window]
        counts = self.inputs[documents]
        used = np.diff(np.concatenate([[0], np.cumsum(counts)])[np.concatenate([[0], self._lasts])])
        return np.insert(documents, self._lasts, PADDING), np.insert(counts, self._lasts, self.length - used)


class Alone:
    """Each document in a separate window, padded at the end."""

    def __init__(self, inputs: Array, length: int):
        self.inputs, self.length, self.windows = inputs, length, len(inputs)

    def __call__(self, draws: Array) -> Layout:
        documents = np.arange(self.windows)
        order = np.stack([documents, np.full(self.windows, PADDING)], axis=1)
        return order.ravel(), np.stack([self.inputs, self.length - self.inputs], axis=1).ravel()


class Epoch:
    """The windows of one epoch: {"tokens", "positions"} int64 [length] each, and targets int64 [length]."""

    def __init__(self, documents: Documents, layout: Layout, length: int, windows: int):
        order, counts = layout
        self._documents, self._length, self._windows = documents, length, windows
        self._padded, self._begins = order == PADDING, documents.begins[np.maximum(order, 0)]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> tuple[dict[str, Array], Array]:
        if not 0 <= index < self._windows:
            raise IndexError(f"{index} is not one of {self._windows} samples")
        start, stop = index * self._length, (index + 1) * self._length
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        here = slice(first, last + 1)
        starts, ends = np.maximum(self._starts[here], start), np.minimum(self._ends[here], stop)

        def each(values: Array) -> Array:
            return np.repeat(values, ends - starts)

        numbers, padded = np.arange(start, stop), each(self._padded[here])
        source = np.where(padded, 0, numbers + each(self._begins[here] - self._starts[here]))
        positions = np.where(padded, 0, numbers - each(starts))
        tokens, targets = (self._documents.tokens[source + n].astype(np.int64) for n in (0, 1))
        learned = self._documents.learned
        counts = ~padded if learned is None else ~padded & learned[source + 1]
        inputs = {"tokens": np.where(padded, 0, tokens), "positions": positions}
        return inputs, np.where(counts, targets, IGNORED)


class Packed:
    """Documents in windows of `length` tokens, as `arrange` puts them by one random number for each document: by (seed,
    epoch), or with `fixed` always in the same order, for held-out documents."""

    def __init__(self, documents: Documents, arrange: Any, length: int, tokenizer: Any, fixed: bool):
        self.documents, self.length, self.tokenizer = documents, length, tokenizer
        self._arrange, self._fixed = arrange, fixed
        self._last: tuple[tuple[int, ...], Epoch] | None = None  # an epoch is arranged once

    def __len__(self) -> int:
        windows: int = self._arrange.windows
        return windows

    def __getitem__(self, index: int) -> tuple[dict[str, Array], Array]:
        return self.at_epoch(0, 0)[index]

    def at_epoch(self, seed: int, epoch: int) -> Epoch:
        """The windows of this epoch."""
        key = () if self._fixed else (seed % 2**64, epoch, _DRAWS)
        if self._last is None or self._last[0] != key:
            number = len(self.documents.begins)
            draws = raw_draws(number, *key) if key else np.arange(number)
            self._last = key, Epoch(self.documents, self._arrange(draws), self.length, len(self))
        return self._last[1]
