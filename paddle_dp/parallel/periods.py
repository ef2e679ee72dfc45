"""When ranks that learn on their own average their weights: every so many updates, behind a warm-up. Arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, sqrt

MOST = 8  # times `every`: a rate that falls to 0 must not end the averaging


@dataclass
class Periods:
    """Updates 1 to `warmup` are those of all ranks together; after them weights are averaged `every` so many.

    With `adaptive` a period that begins at the learning rate r lasts ceil(every · sqrt(r_max / r)) updates, 8 · every
    at most, where r_max is the highest rate so far: the part for learning rates of AdaComm (Wang and Joshi 2019,
    arXiv:1810.08313).
    """

    every: int
    warmup: int = 0
    adaptive: bool = False
    # The update behind which the present period ends; 0: none has begun.
    ends: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)

    def is_local(self, update: int) -> bool:
        """Whether this update (from 1) is one of each rank alone."""
        return update > self.warmup

    def see(self, rate: float) -> None:
        """The learning rate of an update."""
        self.highest = max(self.highest, rate)

    def begin(self, done: int, rate: float) -> None:
        """A period begins behind update `done`, at this learning rate."""
        if self.adaptive:
            self.ends = done + self.length(rate)
        else:  # at the same updates, wherever a training was resumed
            self.ends = done + self.every - (done - self.warmup) % self.every

    def length(self, rate: float) -> int:
        """Of a period that begins at this rate."""
        most = MOST * self.every
        if rate * MOST**2 <= self.highest:
            return most
        return min(ceil(self.every * sqrt(self.highest / rate) - 1e-9), most) if rate > 0 else self.every

    def is_over(self, update: int) -> bool:
        """Whether the ranks average behind this update."""
        return update >= self.ends

    def state(self) -> list[float]:
        return [float(self.ends), self.highest]

    def load(self, state: list[float]) -> None:
        self.ends, self.highest = int(state[0]), state[1]
