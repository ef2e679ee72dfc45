"""The order in which a rank needs parameters under ZeRO-3: recorded in one pass, followed in the next."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from paddle_dp.plan.sharded import chunks

FetchList = tuple[int, ...]
"""The indices of the parameters that a layer needs and that are not gathered yet."""


@dataclass(frozen=True)
class PrefetchTrace:
    """The recorded needs of a pass (forward and backward, or a forward alone) in order, and the parameters that must
    travel.

    `needs`: per layer. `travels`: each need's parameters that are not present any more. `chunks`: the number of the
    chunk in which a need travels, with others. `retained`: pairs (need, index) of parameters that stay because their
    next need follows soon. `gradients` in their order, and `gradient_chunks`, the chunks in which they travel.
    """

    needs: tuple[FetchList, ...]
    gradients: tuple[int, ...]
    travels: tuple[FetchList, ...]
    chunks: tuple[int, ...]
    retained: frozenset[tuple[int, int]]
    gradient_chunks: tuple[int, ...] = ()

    def chunk(self, number: int) -> Iterator[int]:
        """The needs in the same chunk, from need `number` on."""
        return takewhile(
            lambda each: self.chunks[each] == self.chunks[number], range(number, len(self.chunks))
        )

    def until(self, number: int, prefetch: int) -> int:
        """The number of needs, counted from the first, to request when need `number` begins with `prefetch` chunks in
        flight."""
        return bisect_right(self.chunks, self.chunks[number] + prefetch)

    def digest(self) -> bytes:
        """8 bytes, the same for the same order."""
        order = repr((self.needs, self.gradients, self.travels, self.chunks)).encode()
        return hashlib.blake2b(order, digest_size=8).digest()


@dataclass
class TraceRecorder:
    """Records the needs of one pass."""

    needs: list[FetchList] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)  # by index: its last need
    # By (need, index): the number of needs at its release.
    _released: dict[tuple[int, int], int] = field(default_factory=dict)

    def need(self, need: FetchList) -> None:
        for index in need:
            self._last[index] = len(self.needs)
        self.needs.append(need)

    def release(self, index: int) -> None:
        """Records the last use of a parameter before it is needed again."""
        if index in self._last:  # else it was needed before this pass began
            self._released[self._last[index], index] = len(self.needs)

    def gradient(self, index: int) -> None:
        self.gradients.append(index)

    def order(self, loads: Sequence[Sequence[int]], prefetch: int) -> PrefetchTrace:
        """The recorded order, with `prefetch` chunks in flight besides the current one. `loads`: each parameter's bytes
        per rank. For a plan `travels` (plan/sharded.py) decides the same; tests/plan/test_sharded.py holds them
        equal."""
        by_need = [[sum(column) for column in zip(*(loads[p] for p in n), strict=True)] for n in self.needs]
        numbers = chunks(by_need) if prefetch else list(range(len(by_need)))
        last: dict[int, int] = {}
        retained, travels = set(), []
        for number, need in enumerate(self.needs):
            away = []
            for index in need:
                before = last.get(index)
                released = None if before is None else self._released.get((before, index))
                # The next layer after a release requests everything up to this chunk.
                if released is not None and numbers[number] <= numbers[released] + prefetch:
                    retained.add((before, index))
                else:
                    away.append(index)
                last[index] = number
            travels.append(tuple(away))
        return PrefetchTrace(
            needs=tuple(self.needs),
            gradients=tuple(self.gradients),
            travels=tuple(travels),
            chunks=tuple(numbers),
            retained=frozenset((n, index) for n, index in retained if n is not None),
            gradient_chunks=tuple(chunks([loads[index] for index in self.gradients])),
        )
