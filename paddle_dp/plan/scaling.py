"""A forecast for more ranks from a few measured steps: seconds of a step on n ranks, each with a bar.

    t(n, s) = C(s) + e(n) + exposed(n) + jitter · C(s) · log2(n / k)          s samples a rank, k measured ranks

C(s): a rank's seconds alone, the line through two measured batches. e: the additional time of the k ranks of one
machine: they slow one another down (`Probe.crowding`) in proportion to C, and exchange in proportion to (n − 1)/n.
exposed: the gradients' ring over the network of the machines, less the part that overlaps with backward, if the k ranks
show that the software overlaps at all. tools/planner_exam.py holds the same formula to 42 published points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from statistics import median, quantiles

JITTER = 0.02  # of a step, lost for each doubling of the ranks by waiting for the slowest
HIDDEN_SHARE = 0.5  # of a step, behind which gradients can travel: most of backward, two thirds of it
OVERLAPS = 0.05  # of a step: ranks that lose more do not overlap
LINK_SHARE = 0.75  # of a network's rate that a ring carries, as `Rates.node_link`


def step_beyond(alone: float, loss: float, ring: float, doublings: float, overlaps: bool) -> float:
    """Seconds of a step beyond the measured ranks: `alone` without other ranks, `loss` among the measured ones, `ring`
    over the network."""
    exposed = max(0.0, ring - HIDDEN_SHARE * alone) if overlaps else ring
    return alone + loss + exposed + JITTER * alone * doublings


def ring_share(ranks: float) -> float:
    """The bytes that a ring's member sends in an all-reduce, over the tensor's (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Seconds of a step on `ranks` ranks with `samples` on each, between `low` and `high`."""

    ranks: int
    samples: float
    seconds: float
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Samples/s of all ranks."""
        return self.ranks * self.samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps(_Step):
    """The median of some rounds, the fastest and the slowest. `rounds`: all of them, in the order in which other
    measurements took turns."""

    rounds: tuple[float, ...] = ()

    @classmethod
    def from_rounds(cls, ranks: int, samples: float, rounds: Sequence[float]) -> MeasuredSteps:
        """The measurement that these rounds make, in seconds of a step."""
        return cls(
            ranks=ranks, samples=samples, seconds=median(rounds), low=min(rounds), high=max(rounds),
            rounds=tuple(rounds),
        )  # fmt: skip

    def times(self, other: MeasuredSteps) -> tuple[float, float, float]:
        """How many times the samples/s of `other`: the median of the rounds that took turns, and the bounds of 8 of 10
        of them; without rounds, of the extreme ones."""
        share = self.ranks * self.samples / (other.ranks * other.samples)
        if len(self.rounds) != len(other.rounds) or len(self.rounds) < 3:
            return self.rate / other.rate, share * other.low / self.high, share * other.high / self.low
        ratios = [share * theirs / ours for ours, theirs in zip(self.rounds, other.rounds, strict=True)]
        tenths = quantiles(ratios, n=10, method="inclusive")
        return median(ratios), tenths[0], tenths[-1]


@dataclass(frozen=True, kw_only=True)
class ForetoldStep(_Step):
    """`kind`: "measured", "foretold", or "bound": it takes at least `seconds`, and `high` is infinite. `sent`: bytes
    that a rank sends."""

    kind: str
    sent: float


@dataclass(frozen=True, kw_only=True)
class ScalingModel:
    """A training's measured steps on 1 rank and, if there are any, on more ranks of one machine.

    `single`: on one rank, one or two batches. `together`: on `ranks` ranks, weak first. `crowding`: the ratio of a
    rank's seconds among the others to its seconds alone. `exchange`: seconds of one exchange of all gradients among
    them, 0 if no collective was measured; `halved`: the share of them that half as many bytes take. `size`: bytes
    of an all-reduced tensor as large as all gradients. `node`: ranks of one machine; `link`: bytes/s of its
    network, None if no network is known. `hides`: an exchange can overlap with backward, as on accelerators. `bar`:
    the ratio within which 8 of 10 published points lay.
    """

    single: Sequence[MeasuredSteps]
    together: Sequence[MeasuredSteps]
    ranks: int
    crowding: float
    exchange: float
    halved: float
    size: float
    node: int
    link: float | None
    hides: bool
    bar: float

    def alone(self, samples: float) -> float:
        """C: seconds of one rank alone, by the line through its two measured batches; in proportion to one."""
        first = self.single[0]
        if len(self.single) == 1:
            return first.seconds * samples / first.samples
        other = self.single[1]
        slope = (first.seconds - other.seconds) / (first.samples - other.samples)
        # Neither noise nor a cache makes a batch cheaper.
        slope = min(max(slope, 0.0), first.seconds / first.samples)
        return max(first.seconds + slope * (samples - first.samples), 0.0)

    def from_single(self, samples: float) -> tuple[float, float, float]:
        """Seconds on the measured number of ranks as they are foretold without them, from one rank and the probe: with
        the exchange as it hides on such a device; with all of it hidden, from the fastest round; and with none of it,
        from the slowest."""
        crowded, first = self.crowding * self.alone(samples), self.single[0]
        exposed = max(0.0, self.exchange - HIDDEN_SHARE * crowded) if self.hides else self.exchange
        low, high = crowded * first.low / first.seconds, crowded * first.high / first.seconds + self.exchange
        return crowded + exposed, low, high

    def step(self, ranks: int, samples: float, half: bool = False, measured_too: bool = True) -> ForetoldStep:
        """The step on so many ranks with so many samples on each. `half`: as if gradients had half as many bytes.
        `measured_too`: a measured step is its own forecast."""
        size = self.size / 2 if half else self.size
        sent = ring_share(ranks) * size
        forecast = partial(ForetoldStep, ranks=ranks, samples=samples, sent=sent)
        measured = self._measured(ranks, samples) if measured_too and not half else None
        if measured is not None:
            return forecast(seconds=measured.seconds, low=measured.low, high=measured.high, kind="measured")

        def foretold(seconds: float, base: MeasuredSteps) -> ForetoldStep:
            """The bar of published points, and the spread of the measurement on which the forecast stands."""
            low, high = base.low / base.seconds / self.bar, base.high / base.seconds * self.bar
            return forecast(seconds=seconds, low=low * seconds, high=high * seconds, kind="foretold")

        alone = self.alone(samples)
        if ranks == 1:
            return foretold(alone, self.single[0])
        if not self.together:
            floor = alone if self.link is None else max(alone, sent / self.link)
            return forecast(seconds=floor, low=floor, high=float("inf"), kind="bound")
        base = self._nearest(samples)
        crowd, exchange = self.losses(base)
        share = ring_share(min(ranks, self.node)) / ring_share(self.ranks)
        loss = crowd * alone / self.alone(base.samples) + exchange * share * (self.halved if half else 1.0)
        machines, doublings = ranks / self.node, log2(ranks / self.ranks)
        overlaps = self.hides and crowd + exchange < OVERLAPS * self.alone(base.samples)
        if machines <= 1:
            return foretold(step_beyond(alone, loss, 0.0, max(0.0, doublings), overlaps), base)
        if self.link is None:
            floor = alone + loss
            return forecast(seconds=floor, low=floor / self.bar, high=float("inf"), kind="bound")
        ring = ring_share(machines) * size / (LINK_SHARE * self.link)
        return foretold(step_beyond(alone, loss, ring, doublings, overlaps), base)

    def losses(self, base: MeasuredSteps) -> tuple[float, float]:
        """Seconds that a measured step of several ranks takes more than one alone: by crowding, and by the exchange."""
        alone = self.alone(base.samples)
        more = max(0.0, base.seconds - alone)
        crowd = min(more, max(0.0, self.crowding - 1) * alone)
        return crowd, more - crowd

    def _measured(self, ranks: int, samples: float) -> MeasuredSteps | None:
        steps = (*self.single, *self.together)
        return next((each for each in steps if each.ranks == ranks and each.samples == samples), None)

    def _nearest(self, samples: float) -> MeasuredSteps:
        """The measured step of several ranks whose batch is nearest."""
        return min(self.together, key=lambda each: abs(log2(each.samples / samples)))
