"""Ranks that run their programs at once, over links that carry message after message."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

Key = Hashable


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "push", "fetch"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The seconds of an exchange among so many `ranks` over a link without limit, that comes `pause` seconds after the
    last one: `start`, and `byte` for each byte of the longer direction, which is copied and added while the link
    carries others.

    Of `push` and `fetch`: the seconds that one gradient pushed, or one weight fetched, takes from the rank's own work.
    """

    ranks: int = 2
    pause: float = 0.0
    start: float = 0.0
    byte: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rank's link: `rate` bytes/s in each direction, of which `burst` bytes pass at once after a pause (a token
    bucket). `costs`: what each kind of exchange takes beside that, by its ranks and pause, the least first."""

    rate: float
    burst: float = 0.0
    costs: Mapping[Kind, Sequence[Cost]] = field(default_factory=dict)

    def cost(self, kind: Kind, pause: float, ranks: int) -> Cost:
        """Between two pauses that were measured, on the line from one to the other; of a group of `ranks`, or of the
        next larger one that was measured."""
        costs = self.costs.get(kind) or [Cost()]
        size = min((cost.ranks for cost in costs if cost.ranks >= ranks), default=costs[-1].ranks)
        costs = [cost for cost in costs if cost.ranks == size]
        if pause <= costs[0].pause or len(costs) == 1:
            return costs[0]
        for one, other in itertools.pairwise(costs):
            if pause <= other.pause:
                far = (pause - one.pause) / (other.pause - one.pause)
                start, byte = (
                    a + far * (b - a) for a, b in ((one.start, other.start), (one.byte, other.byte))
                )
                return Cost(ranks=size, pause=pause, start=start, byte=byte)
        return costs[-1]


@dataclass
class Transfer:
    """An exchange on a `stream`, which carries out one after another: it begins when all `starters` have come to it and
    their streams are free. `flows`: bytes out of and into each rank's link. `ends`: when each rank has it, in
    seconds."""

    starters: frozenset[int]
    flows: Mapping[int, tuple[float, float]]
    stream: Key
    kind: Kind = "send"
    messages: int = 1  # one after another
    came: set[int] = field(default_factory=set)
    ends: dict[int, float] = field(default_factory=dict)


Op = tuple[Literal["work", "start", "wait", "mark"], Any]  # seconds of work, the key of a transfer


class Play:
    """Ranks that run their programs at once, over their links."""

    def __init__(
        self, programs: Sequence[Sequence[Op]], transfers: Mapping[Key, Transfer], link: Link
    ) -> None:
        self.programs, self.transfers, self.link = programs, transfers, link
        # When each direction of a rank's link has carried all.
        self._free = [[-inf, -inf] for _ in programs]
        self._last: dict[tuple[int, Key], float] = {}  # when a rank's last transfer of a stream ended
        self._at = [0] * len(programs)
        self._queues: dict[tuple[int, Key], deque[Key]] = defaultdict(deque)
        self._waiting: dict[Key, list[int]] = defaultdict(list)
        self._events: list[
            tuple[float, int, int, Key]
        ] = []  # seconds, order, rank, the transfer that leaves its stream
        self._order = itertools.count()

    def marks(self) -> list[list[float]]:
        """The seconds at which each rank passes its marks. Raises ValueError if ranks wait for each other for ever."""
        marks: list[list[float]] = [[] for _ in self.programs]
        for rank in range(len(self.programs)):
            self._later(0.0, rank)
        while self._events:
            now, _, rank, ended = heapq.heappop(self._events)
            if ended is None:
                self._run(rank, now, marks[rank])
                continue
            queue = self._queues[rank, self.transfers[ended].stream]
            queue.popleft()
            if queue:
                self._begin(queue[0], now)
        if any(at < len(program) for at, program in zip(self._at, self.programs, strict=True)):
            raise ValueError(f"the ranks wait for each other for ever, for {[*self._waiting][:3]}")
        return marks

    def _later(self, when: float, rank: int, ended: Key = None) -> None:
        heapq.heappush(self._events, (when, next(self._order), rank, ended))

    def _run(self, rank: int, now: float, marks: list[float]) -> None:
        """Runs a rank's program until it computes or waits."""
        program = self.programs[rank]
        while self._at[rank] < len(program):
            kind, subject = program[self._at[rank]]
            if kind == "wait" and not self.transfers[subject].ends:
                self._waiting[subject].append(rank)
                return
            self._at[rank] += 1
            if kind == "mark":
                marks.append(now)
            elif kind == "start":
                transfer = self.transfers[subject]
                transfer.came.add(rank)
                self._queues[rank, transfer.stream].append(subject)
                self._begin(subject, now)
            else:
                until = now + subject if kind == "work" else self.transfers[subject].ends[rank]
                if until > now:
                    self._later(until, rank)
                    return

    def _begin(self, key: Key, now: float) -> None:
        """Carries a transfer, if all are there and nothing is before it."""
        transfer = self.transfers[key]
        if not transfer.starters <= transfer.came:
            return
        if any(self._queues[rank, transfer.stream][0] != key for rank in transfer.starters):
            return
        for rank, sizes in transfer.flows.items():
            pause = now - self._last.get((rank, transfer.stream), 0.0)
            cost = self.link.cost(transfer.kind, pause, len(transfer.flows))
            arrivals = [self._carried(rank, way, size, now) for way, size in enumerate(sizes) if size]
            copied = now + cost.byte * max(sizes)
            transfer.ends[rank] = max([copied, *arrivals]) + cost.start * transfer.messages
            self._last[rank, transfer.stream] = transfer.ends[rank]
        if len(transfer.starters) == 1:  # a message: it is there when both links have carried it
            transfer.ends = dict.fromkeys(transfer.ends, max(transfer.ends.values()))
        for rank in transfer.starters:
            self._later(transfer.ends[rank], rank, ended=key)
        for rank in self._waiting.pop(key, []):
            self._later(transfer.ends[rank], rank)

    def _carried(self, rank: int, way: int, size: float, now: float) -> float:
        """When the link has carried so many bytes that come at `now`, in seconds."""
        free = max(self._free[rank][way], now - self.link.burst / self.link.rate)
        self._free[rank][way] = free + size / self.link.rate
        return max(now, self._free[rank][way])
