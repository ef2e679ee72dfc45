"""The ledger of a round: the shares of its global batches that ranks have claimed, and those that are done."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt

Share = tuple[int, int]
"""A share of a global batch: the batch's number in its epoch, and the share's (its dp_rank in synchronous training)."""

Sums = Mapping[str, float]
"""A share's sums of loss and scores; `count`: the loss's count; `gradient_norm`: the norm of its mean gradient."""


@dataclass
class Assignments:
    """Hands out the `shares` of the global batches `first` to `stop` - 1, in order, to the ranks that claim them.

    `stop` may become smaller (`cut`). The unfinished shares of a rank that is `gone` are handed out again.

    A slow rank gets no share that the others could finish first, so the round does not wait for it. `pace`: seconds per
    share by rank, as far as known.
    """

    first: int
    stop: int
    shares: int
    pace: dict[int, float] = field(default_factory=dict)
    # Ranks that got None for their last claim.
    _ended: set[int] = field(default_factory=set, init=False)
    _computed: set[int] = field(default_factory=set, init=False)  # ranks that have computed a share
    _next: int = field(default=0, init=False)  # the next share, counted from the first one of `first`
    _assigned: defaultdict[int, list[Share]] = field(default_factory=lambda: defaultdict(list), init=False)
    _returned: deque[Share] = field(default_factory=deque, init=False)
    _sums: list[tuple[int, Sums]] = field(default_factory=list, init=False)  # with the batch

    def claim(self, rank: int) -> Share | None:
        """The next share for `rank` to compute; None if there is none left for it."""
        left = (self.stop - self.first) * self.shares - self._next
        if self._returned:
            share = self._returned.popleft()
        elif left > 0 and not self._is_too_slow(rank, left):
            batch, index = divmod(self._next, self.shares)
            share, self._next = (self.first + batch, index), self._next + 1
        else:
            self._ended.add(rank)
            return None
        self._assigned[rank].append(share)
        self._ended.discard(rank)
        return share

    def _is_too_slow(self, rank: int, left: int) -> bool:
        """True if the others will have computed the shares that are `left`, and those that they hold, before this rank
        has computed one more."""
        peers = [other for other in self._assigned if other != rank and other not in self._ended]
        if rank not in self.pace or not peers or any(other not in self.pace for other in peers):
            return False
        seconds = (len(self._assigned[rank]) + 1) * self.pace[rank]
        held_shares = sum(len(self._assigned[other]) for other in peers)
        return sum(seconds / self.pace[other] for other in peers) >= left + held_shares

    def done(self, rank: int, share: Share, sums: Sums | None, seconds: float | None = None) -> None:
        """Records that a rank has computed a claimed share. `seconds`: its time without waiting for others: a rank that
        is held back because it is far ahead is not slow."""
        if seconds is not None:
            if rank in self._computed:  # the first one includes one-time work
                took = max(seconds, 1e-6)
                self.pace[rank] = (took + self.pace.get(rank, took)) / 2
            self._computed.add(rank)
        if share in self._assigned[rank]:  # else it was given up, and another rank computes it
            self._assigned[rank].remove(share)
            if sums is not None:
                self._sums.append((share[0], sums))

    def known_pace(self) -> dict[int, float]:
        """The pace for the next round, of the ranks that have computed in this one. A rank that was too slow for this
        round may have become faster, which only a share shows."""
        return {rank: pace for rank, pace in self.pace.items() if rank in self._computed}

    def cut(self) -> None:
        """Begins no further global batch."""
        self.stop = min(self.stop, self.first - (-self._next // self.shares))

    def gone(self, rank: int) -> None:
        """Takes the shares of a rank that computes no more back."""
        self._ended.add(rank)
        self._returned.extend(self._assigned.pop(rank, []))

    @property
    def has_more(self) -> bool:
        """True if a rank that got None may claim again, since another rank is gone."""
        left = (self.stop - self.first) * self.shares - self._next
        return bool(self._returned) or (left > 0 and self._ended.issuperset(self._assigned))

    @property
    def is_done(self) -> bool:
        """True if every share up to `stop` was computed."""
        left = (self.stop - self.first) * self.shares - self._next
        return left <= 0 and not self._returned and not any(self._assigned.values())

    def reported(self, batch: int) -> dict[str, float]:
        """The means over the shares of global batches up to this one that were done since the last call; {} if there
        are none."""
        reported = [sums for number, sums in self._sums if number <= batch]
        self._sums = [each for each in self._sums if each[0] > batch]
        return means(reported)


def means(shares: list[Sums]) -> dict[str, float]:
    """Means of shares' sums over their counts; for norms, the root of the weighted mean of their squares."""
    count = sum(sums["count"] for sums in shares)
    if not count:
        return {}
    names = [name for name in shares[0] if name not in ("count", "gradient_norm")]
    averages = {name: sum(sums[name] for sums in shares) / count for name in names}
    squares = sum(sums["count"] * sums["gradient_norm"] ** 2 for sums in shares)
    return {**averages, "gradient_norm": sqrt(squares / count)}
