"""Which rank adds up which numbers of each gradient: arithmetic, without processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Numbers of a piece: a larger one waits too long for its sum, smaller ones cost a message each.
MOST = 1 << 18
LEAST = 1 << 14  # numbers of a keeper's share: with fewer keepers' shares a link is busier than the others


@dataclass(frozen=True)
class Piece:
    """The numbers from `start` to `stop` of the flat gradient at `place`, which `owner` adds up; `keepers` get the sum.

    `owner` is one of the `keepers`, which are global ranks.
    """

    place: int
    start: int
    stop: int
    owner: int
    keepers: tuple[int, ...]


def cut(sizes: Sequence[int], keepers: Sequence[Sequence[int]]) -> list[Piece]:
    """The pieces of gradients of these `sizes`, each of which its `keepers` keep; in the order of places.

    A gradient's numbers are shared equally among its keepers, so that all add and send as much, whatever the sizes; a
    small gradient's among some of them, those with the fewest.
    """
    added: dict[int, int] = {}
    pieces = []
    for place, (size, of_place) in enumerate(zip(sizes, keepers, strict=True)):
        shares = max(1, min(len(of_place), size // LEAST))
        order = sorted(of_place, key=lambda rank: added.get(rank, 0))[:shares]
        for owner, (first, last) in zip(sorted(order), _ranges(0, size, shares), strict=True):
            added[owner] = added.get(owner, 0) + last - first
            for start, stop in _ranges(first, last, -(-(last - first) // MOST)):
                pieces.append(Piece(place, start, stop, owner, tuple(of_place)))
    return pieces


def _ranges(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges, as equal as they can be."""
    ends = [first + (last - first) * part // max(parts, 1) for part in range(max(parts, 1) + 1)]
    return list(itertools.pairwise(ends))
