"""The order in which a rank needs parameters under ZeRO-3: written down in one pass, followed in the next."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

Need = tuple[int, ...]
"""The places of the parameters that a layer needs and that are not gathered yet."""

SMALL = 8  # layers of less than 1/8 of the largest one travel together with the next: a norm's time hides no matrix


@dataclass(frozen=True)
class Order:
    """What a pass (forward and backward, or a forward alone) needed, in its order, and what of it has to travel.

    `needs` of the layers; `travels`, what of each is not here any more; `chunks`, the number of the chunk in which it
    travels: one layer, or some small ones and the next; `kept`: pairs (need, place) of parameters that stay from this
    need to their next one, which comes so soon that they would be fetched at once. `gradients` in their order.
    """

    needs: tuple[Need, ...]
    gradients: tuple[int, ...]
    travels: tuple[Need, ...]
    chunks: tuple[int, ...]
    kept: frozenset[tuple[int, int]]

    def until(self, number: int, ahead: int) -> int:
        """How many needs, from the first one on, are asked for when need `number` begins and `ahead` chunks shall be
        under way."""
        return bisect_right(self.chunks, self.chunks[number] + ahead)

    def digest(self) -> bytes:
        """The same 8 bytes for the same order."""
        told = repr((self.needs, self.gradients, self.travels)).encode()
        return hashlib.blake2b(told, digest_size=8).digest()


@dataclass
class Diary:
    """Writes down what one pass needs."""

    needs: list[Need] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)  # by place: its last need
    _released: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # (need, place): needs seen until then

    def need(self, need: Need) -> None:
        for place in need:
            self._last[place] = len(self.needs)
        self.needs.append(need)

    def release(self, place: int) -> None:
        """After the last use of a parameter, until it is needed again."""
        if place in self._last:  # else it was needed before this pass began
            self._released[self._last[place], place] = len(self.needs)

    def gradient(self, place: int) -> None:
        self.gradients.append(place)

    def order(self, sizes: Sequence[int], ahead: int) -> Order:
        """The order, for parameters of these `sizes` in bytes and `ahead` chunks under way besides the one at work."""
        chunks = chunked([sum(sizes[place] for place in need) for need in self.needs], together=ahead > 0)
        last: dict[int, int] = {}
        kept, travels = set(), []
        for number, need in enumerate(self.needs):
            away = []
            for place in need:
                before = last.get(place)
                released = None if before is None else self._released.get((before, place))
                # When the next layer begins after a release, everything up to this chunk is asked for.
                if released is not None and chunks[number] <= chunks[released] + ahead:
                    kept.add((before, place))
                else:
                    away.append(place)
                last[place] = number
            travels.append(tuple(away))
        return Order(
            needs=tuple(self.needs),
            gradients=tuple(self.gradients),
            travels=tuple(travels),
            chunks=tuple(chunks),
            kept=frozenset((n, place) for n, place in kept if n is not None),
        )


def chunked(loads: Sequence[int], together: bool) -> list[int]:
    """The chunk of each of some needs of so many bytes: small ones `together` with the next, or each its own."""
    least = max(loads, default=0) / SMALL if together else 0.0
    chunks, chunk, have = [], 0, 0
    for load in loads:
        chunks.append(chunk)
        have += load
        if have >= least:
            chunk, have = chunk + 1, 0
    return chunks
